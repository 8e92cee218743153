// SPDX-License-Identifier: Apache-2.0

// Command push makes all hostile images out of a good checkpoint image, and pushes each to the same repository with the trick's
// name as its tag. It prints a line for each: the reference, and a part of the message that a node must refuse it with.
//
//	go run ./test/hostile/push REGISTRY/REPOSITORY:TAG
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"thaw.dev/thaw/test/hostile"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: push REGISTRY/REPOSITORY:TAG")
		os.Exit(2)
	}
	if err := push(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "push:", err)
		os.Exit(1)
	}
}

func push(ctx context.Context, ref string) error {
	source, err := hostile.Pull(ctx, ref)
	if err != nil {
		return err
	}
	for _, trick := range hostile.Tricks() {
		i, err := source.Image()
		if err != nil {
			return err
		}
		if err := trick.Apply(i); err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		p, err := source.Push(ctx, i, trick.Name)
		if err != nil {
			return fmt.Errorf("%s: %w", trick.Name, err)
		}
		if len(p.Answers) > 0 || trick.Pod != nil {
			continue // no registry takes it, or it is one for certain pods only
		}
		fmt.Printf("%s\t%s\n", p.Reference, trick.Says)
	}
	return nil
}
