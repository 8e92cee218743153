// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"

	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
)

// peer is a system of others that restores a checkpoint from the registry. It plugs in as a constructor in peers; everything else
// (alternation, time, traffic, checking the reply, rows) is done here.
type peer interface {
	// Trial restores once, on a node that has nothing of the checkpoint but what is there before any pod asks for it (for
	// every system: the pulled root filesystem and a pod sandbox that runs).
	//
	// It makes ready what is not measured, calls start just before it asks for the restore, and returns as soon as the program
	// runs: the caller asks the server at ip for its first reply and stops the time. remove ends the container and takes away
	// everything that the trial left on the node, so that the next one is cold again; it is nil only with an error, before which Trial
	// itself has tidied up.
	Trial(ctx context.Context, start func()) (ip string, remove func(context.Context) error, err error)
	// Close removes what the constructor made.
	Close(ctx context.Context) error
}

// newPeer prepares a system for a checkpoint, once for each link and before any measurement: for example it writes an image of its
// own to the same registry. Whatever is written there goes directly, to stack.RegistryAddress; what trials read comes by c.Registry.
type newPeer func(ctx context.Context, s *stack.Stack, c baseline.Checkpoint) (peer, error)

// peers are the systems of others, by the name in their rows.
var peers = []struct {
	name string
	new  newPeer
}{
	{podman, func(ctx context.Context, s *stack.Stack, c baseline.Checkpoint) (peer, error) {
		return baseline.NewPodman(ctx, s, c)
	}},
	{estargz, func(ctx context.Context, s *stack.Stack, c baseline.Checkpoint) (peer, error) {
		return baseline.NewEstargz(ctx, s, c)
	}},
}
