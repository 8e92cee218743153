// SPDX-License-Identifier: Apache-2.0

package uffd

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Kind is what an event reports (UFFD_EVENT_ in linux/userfaultfd.h).
type Kind uint8

const (
	// Pagefault: a thread waits for the page at Start.
	Pagefault Kind = 0x12
	// Fork: the process forked; FD is the child's userfaultfd, close-on-exec
	// and non-blocking as the parent's. The reader owns it.
	Fork Kind = 0x13
	// Remap: memory moved from Start, End to To (mremap). If the old place was
	// unmapped with it, as is usual, an Unmap event of exactly that place follows,
	// perhaps after events of other threads.
	Remap Kind = 0x14
	// Remove: the content from Start to End is about to be thrown away
	// (madvise); the memory stays mapped.
	Remove Kind = 0x15
	// Unmap: there is no mapping from Start to End any more.
	Unmap Kind = 0x16
)

// Event is one event.
type Event struct {
	Kind  Kind
	Start uint64 // not of Fork
	End   uint64 // of Remap, Remove and Unmap
	To    uint64 // of Remap
	FD    FD     // of Fork
}

const (
	messageSize = 32 // struct uffd_msg
	batch       = 64
)

// Buffer is what events are read into: large enough that one system call
// usually returns all.
type Buffer struct{ raw [batch * messageSize]byte }

// Read reads the events that wait, as many as fit, and returns their number. It
// does not block. EAGAIN: there are none. EMFILE, ENFILE: no descriptor is free
// for a forked child; the event is still there.
func (f FD) Read(b *Buffer) (int, error) {
	for {
		n, err := unix.Read(int(f), b.raw[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, err
		}
		return n / messageSize, nil
	}
}

// Event returns event i of the last Read. A Kind other than the known ones is
// one that nobody asked the kernel for.
func (b *Buffer) Event(i int) Event {
	m := b.raw[i*messageSize:][:messageSize]
	arg := func(i int) uint64 { return binary.NativeEndian.Uint64(m[8+8*i:]) }
	e := Event{Kind: Kind(m[0]), FD: -1}
	switch e.Kind {
	case Pagefault:
		e.Start = arg(1) // behind the flags
	case Fork:
		e.FD = FD(binary.NativeEndian.Uint32(m[8:]))
	case Remap:
		e.Start, e.To = arg(0), arg(1)
		e.End = e.Start + arg(2)
	case Remove, Unmap:
		e.Start, e.End = arg(0), arg(1)
	}
	return e
}

// Len is the number of events that fit. A Read that returned fewer has read all.
func (b *Buffer) Len() int { return batch }
