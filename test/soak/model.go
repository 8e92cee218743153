// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// kind is a program that is checkpointed.
type kind struct {
	workload string
	args     []string
	env      map[string]string
}

var (
	server  = kind{workload: workloads.Synthetic, env: map[string]string{"MEMORY_MIB": "24"}}
	torture = kind{workload: workloads.Torture}
)

// checkpoint is an image in the registry.
type checkpoint struct {
	kind
	ref      string
	requests int // that the server had answered
}

// member is a container that lives, in a pod of its own.
type member struct {
	checkpoint
	pod       *stack.Pod
	container *stack.Container
	restored  bool
	lines     stack.State // what is there because of it
}

// soak is the state of the run.
type soak struct {
	*stack.Stack
	random *rand.Rand

	steps       int
	began       time.Time
	counts      map[string]int
	restoring   []time.Duration
	checkpoints []checkpoint
	members     []*member
	baseline    stack.State // without any container
	daemon      int         // its file descriptors without any container
	images      int         // made so far
	expired     int         // leases of pulls that ended with containerd
}

func newSoak(s *stack.Stack, random *rand.Rand) *soak {
	return &soak{Stack: s, random: random, began: time.Now(), counts: make(map[string]int)}
}

func (k *soak) count(what string) { k.counts[what]++ }

// maxMembers bounds the containers at a time, and maxCheckpoints those that are kept to be restored.
const (
	maxMembers     = 5
	maxCheckpoints = 8
)

// begin makes the first checkpoints.
func (k *soak) begin(ctx context.Context) error {
	if err := k.PushWorkloads(ctx, server.workload, torture.workload); err != nil {
		return err
	}
	for _, w := range []string{server.workload, torture.workload} {
		if err := k.EnsureImage(ctx, k.Workload(w), nil); err != nil {
			return err
		}
	}
	if err := k.rest(ctx); err != nil {
		return err
	}
	first := []kind{server, server}
	for range 3 {
		t := torture
		t.args = []string{fmt.Sprint(k.random.Uint32()), "300", "600"}
		first = append(first, t)
	}
	for _, f := range first {
		m, err := k.run(ctx, checkpoint{kind: f, ref: k.Workload(f.workload)}, nil)
		if err != nil {
			return err
		}
		if err := k.freeze(ctx, m, f.workload == torture.workload); err != nil {
			return err
		}
	}
	return k.drain(ctx)
}

// rest takes stock while no container lives.
func (k *soak) rest(ctx context.Context) (err error) {
	if k.baseline, err = k.State(ctx); err != nil {
		return err
	}
	k.daemon, err = descriptors(k.Daemon().PID())
	return err
}

func descriptors(pid int) (int, error) {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(fds), err
}

// expected is what may be there now.
func (k *soak) expected() stack.State {
	all := maps.Clone(k.baseline)
	for _, m := range k.members {
		maps.Copy(all, m.lines)
	}
	return all
}

// settle is how long what is no longer needed may stay; the daemon sweeps every minute what nobody could release.
const settle = 80 * time.Second

// clean waits until nothing is there that belongs to no container.
func (k *soak) clean(ctx context.Context) error {
	expected := k.expected()
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var leaked []string
	for {
		now, err := k.State(ctx) // an error: containerd has just been started
		if err == nil {
			if leaked = slices.DeleteFunc(now.Leaked(expected), k.ours); len(leaked) == 0 {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("left behind:\n  %s", strings.Join(leaked, "\n  ")), err)
		case <-tick.C:
		}
	}
}

// ours tells whether a line is of a process that a living container has started since.
func (k *soak) ours(line string) bool {
	var pid int
	if _, err := fmt.Sscanf(line, "process %d:", &pid); err != nil {
		return false
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return true // ended since
	}
	return slices.ContainsFunc(k.members, func(m *member) bool { return strings.Contains(string(text), m.container.ID) })
}

// drain removes all containers. Then all is as it was at the beginning.
func (k *soak) drain(ctx context.Context) error {
	k.count("drains")
	for len(k.members) > 0 {
		if err := k.remove(ctx, k.members[0]); err != nil {
			return err
		}
	}
	if err := k.clean(ctx); err != nil {
		return err
	}
	fds, err := descriptors(k.Daemon().PID())
	if err != nil {
		return err
	}
	// Connections to registry and containerd come and go.
	if fds > k.daemon+16 {
		return fmt.Errorf("the daemon has %d file descriptors, it had %d at the beginning", fds, k.daemon)
	}
	return k.temporary()
}

// temporary looks for files that were to be there only while they are made.
func (k *soak) temporary() error {
	var errs []error
	for _, dir := range []string{k.ThawCache() + "/pages", k.ThawCache() + "/metadata", k.ThawCache() + "/workingsets", stack.ThawStateDir + "/images", stack.ThawStateDir + "/restores"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".tmp-") {
				errs = append(errs, fmt.Errorf("left behind: %s/%s", dir, e.Name()))
			}
		}
	}
	return errors.Join(errs...)
}

// summary prints what was done.
func (k *soak) summary() {
	fmt.Printf("soak: %d steps in %v\n", k.steps, time.Since(k.began).Round(time.Second))
	for _, what := range slices.Sorted(maps.Keys(k.counts)) {
		fmt.Printf("  %-40s %6d\n", what, k.counts[what])
	}
	fmt.Printf("  %-40s %6d\n", "pulls that ended with containerd", k.expired)
	if n := len(k.restoring); n > 0 {
		slices.Sort(k.restoring)
		fmt.Printf("  a start of a restored container without a fault took %v (median), %v (99th percentile)\n",
			k.restoring[n/2].Round(time.Millisecond), k.restoring[n*99/100].Round(time.Millisecond))
	}
}
