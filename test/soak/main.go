// SPDX-License-Identifier: Apache-2.0

//go:build linux

// soak runs the whole stack for a set time: it restores, uses, checkpoints and deletes containers in a random order that a
// seed gives, while daemon, shims, containerd, registry and cache fail. The programs in the containers check their own memory. After
// each step nothing may be there that does not belong to a container that lives: no process, mount, cgroup, network device,
// socket, folder, snapshot, lease or record. It ends with the first thing that is wrong, and prints a summary in any case.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
)

func main() {
	duration := flag.Duration("duration", time.Minute, "how long to go on")
	seed := flag.Uint64("seed", 0, "of the order of steps; 0 is a random one")
	flag.Parse()
	stack.Isolate()
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	fmt.Printf("soak: seed %d for %v\n", *seed, *duration)
	if err := run(*duration, *seed); err != nil {
		fmt.Fprintf(os.Stderr, "soak: seed %d: %v\n", *seed, err)
		os.Exit(1)
	}
}

func run(duration time.Duration, seed uint64) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stdout, DaemonConfig: daemonConfig})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	k := newSoak(s, rand.New(rand.NewPCG(seed, seed)))
	defer k.summary()
	if err := k.begin(ctx); err != nil {
		return err
	}
	for end := time.Now().Add(duration); time.Now().Before(end) && ctx.Err() == nil; {
		if err := k.step(ctx); err != nil {
			return fmt.Errorf("step %d: %w", k.steps, err)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return k.drain(ctx)
}

// daemonConfig leaves room for a few checkpoints, so that pages are evicted all the time.
const daemonConfig = `
[limits]
cache_size = "96MiB"
unused_images = 2
`
