// SPDX-License-Identifier: Apache-2.0

//go:build linux

package baseline

import "context"

// Checkpoint is a program that was checkpointed while it served, and how to have it again.
type Checkpoint struct {
	Name     string            // of the workload and its size, fit for a repository's name
	Registry string            // host:port over which the node reaches the registry, plain HTTP; a shaped link has one of its own
	Base     string            // reference of the program's image; it is on the node before anything is measured, so not by Registry
	Image    string            // reference of the checkpoint image, by Registry
	Images   string            // folder with the complete CRIU images; shared, not to be written to
	Env      map[string]string // of the container
	// Warm brings a program that was just started at an address, without port, to the state that was checkpointed.
	Warm func(ctx context.Context, ip string) error
}
