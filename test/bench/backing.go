// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// maxBacked bounds the memory that is touched before a trial, in bytes.
const maxBacked = 4 << 30

// back touches free memory and gives it back. A virtual machine's host may take free memory away and provide it again only
// when it is touched, which can take longer than everything else that a page fault does: a trial would measure when the trials before
// it ended. Done before the time begins, for all systems alike.
func back(mib int) error {
	// As much as the page cache and the process take together.
	n := min(2*mib<<20+512<<20, maxBacked)
	memory, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("memory of the machine: %w", err)
	}
	for at := 0; at < n; at += pageindex.PageSize {
		memory[at] = 1
	}
	return unix.Munmap(memory)
}
