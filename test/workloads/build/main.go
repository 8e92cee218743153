// SPDX-License-Identifier: Apache-2.0

// build makes the workloads' programs and root filesystem below build/. Run it from anywhere in the checkout.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "workloads:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	root, err := stack.Root()
	if err != nil {
		return err
	}
	return workloads.Build(ctx, root, os.Stdout)
}
