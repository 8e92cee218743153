// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// backed is how much memory is touched before a trial, in bytes: more than a lazy restore takes up to its first reply. Far more
// would have the host take it away again while the trial runs.
const backed = 512 << 20

// back touches free memory and gives it back. A virtual machine's host may take free memory away and provide it again only
// when it is touched, which can take longer than everything else that a page fault does: a trial would measure when the trials before
// it ended. Done before the time begins, for all systems alike.
func back() error {
	memory, err := unix.Mmap(-1, 0, backed, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("memory of the machine: %w", err)
	}
	for at := 0; at < backed; at += pageindex.PageSize {
		memory[at] = 1
	}
	return unix.Munmap(memory)
}
