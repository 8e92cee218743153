// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// applied is a pager with one space that wants the pages given, and that saw the
// events given.
func applied(t *testing.T, wanted ranges, events ...uffd.Event) (*Pager, *space) {
	t.Helper()
	p := &Pager{}
	p.loop.init(p)
	s := &space{fd: -1, wanted: wanted, pending: map[uint64]waiting{}}
	for _, e := range events {
		if err := p.apply(s, e, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	return p, s
}

func at(r ranges, a uint64) string {
	s, ok := r.next(a)
	if !ok || s.start > a {
		return "zero"
	}
	return fmt.Sprint(s.from(a).page)
}

// While thread A's move from x to y is only half reported, thread B moves z to
// the place that is free now. The second half must not strike off what came.
func TestSecondHalfOfMove(t *testing.T) {
	const x, y, z, n = 0x100000, 0x200000, 0x300000, 4 * pageSize
	run := func(start, page uint64) pageindex.Run { return pageindex.Run{Start: start, Pages: 4, Page: page} }
	move := func(from, to uint64) uffd.Event {
		return uffd.Event{Kind: uffd.Remap, Start: from, End: from + n, To: to}
	}
	unmap := func(from uint64) uffd.Event { return uffd.Event{Kind: uffd.Unmap, Start: from, End: from + n} }
	_, s := applied(t, newRanges([]pageindex.Run{run(x, 10), run(z, 30)}), move(x, y), move(z, x), unmap(x), unmap(z))
	if at(s.wanted, x) != "30" || at(s.wanted, y) != "10" || at(s.wanted, z) != "zero" {
		t.Errorf("x %s, y %s, z %s", at(s.wanted, x), at(s.wanted, y), at(s.wanted, z))
	}
	// The next one is of its own.
	p, s := applied(t, newRanges([]pageindex.Run{run(x, 10), run(z, 30)}), move(x, y), unmap(x), move(z, x), unmap(z), unmap(x))
	if at(s.wanted, x) != "zero" || at(s.wanted, y) != "10" {
		t.Errorf("x %s, y %s", at(s.wanted, x), at(s.wanted, y))
	}
	if len(p.loop.restless) != 1 {
		t.Error("nobody looks when the space is quiet")
	}
}

// A child's mappings decide what came before its fork.
func TestInherited(t *testing.T) {
	f, err := uffd.Open(0)
	if err != nil {
		t.Skipf("no userfaultfd here: %v", err)
	}
	defer f.Close()
	const n = 4 * pageSize
	// Four places, of which some are registered, as they would be in the child.
	m, err := unix.Mmap(-1, 0, 4*n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m))))
	x, y := base, base+2*n
	move := uffd.Event{Kind: uffd.Remap, Start: x, End: x + n, To: y}
	tail := uffd.Event{Kind: uffd.Unmap, Start: x, End: x + n}
	over := uffd.Event{Kind: uffd.Unmap, Start: y, End: y + n}
	drop := uffd.Event{Kind: uffd.Remove, Start: x, End: x + n}
	for _, c := range []struct {
		name   string
		mapped []uint64
		events []uffd.Event
		read   int // when the fork was reported
		x, y   string
	}{
		{"no change", []uint64{x}, nil, 0, "10", "zero"},
		{"move, then fork", []uint64{y}, []uffd.Event{move, tail}, 2, "zero", "10"},
		{"fork, then move", []uint64{x}, []uffd.Event{move, tail}, 0, "10", "zero"},
		{"move, then fork, reported last", []uint64{y}, []uffd.Event{move, tail}, 0, "zero", "10"},
		{"fork, then move, reported last", []uint64{x}, []uffd.Event{move, tail}, 2, "10", "zero"},
		{"fork within a move", []uint64{y}, []uffd.Event{move, tail}, 1, "zero", "10"},
		{"move that keeps its place, then fork", []uint64{x, y}, []uffd.Event{move}, 1, "zero", "10"},
		{"fork, then move that keeps its place", []uint64{x}, []uffd.Event{move}, 0, "10", "zero"},
		{"fork within a move over another mapping", []uint64{y}, []uffd.Event{over, move, tail}, 1, "zero", "10"},
		{"move, and growth over the old place, then fork", []uint64{x, y}, []uffd.Event{move, tail}, 2, "zero", "10"},
		{"fork, then move over another mapping", []uint64{x, y}, []uffd.Event{over, move, tail}, 0, "10", "zero"},
		{"fork, then move of what has grown since to where something was", []uint64{y}, []uffd.Event{over, move, tail}, 0, "10", "zero"},
		{"unmap, then fork", nil, []uffd.Event{tail}, 1, "zero", "zero"},
		{"fork, then unmap", []uint64{x}, []uffd.Event{tail}, 0, "10", "zero"},
		{"unmap, then fork, reported first", nil, []uffd.Event{tail}, 0, "zero", "zero"},
		{"remove, then fork", []uint64{x}, []uffd.Event{drop}, 1, "zero", "zero"},
		{"fork, then remove", []uint64{x}, []uffd.Event{drop}, 0, "10", "zero"},
	} {
		for _, a := range c.mapped {
			if err := f.Register(a, n); err != nil {
				t.Fatal(err)
			}
		}
		e := epoch{base: newRanges([]pageindex.Run{{Start: x, Pages: 4, Page: 10}}), events: c.events}
		r := e.inherited(&space{fd: f}, c.read)
		if at(r, x) != c.x || at(r, y) != c.y {
			t.Errorf("%s: x %s, y %s, want %s, %s", c.name, at(r, x), at(r, y), c.x, c.y)
		}
		if err := f.Unregister(base, 4*n); err != nil {
			t.Fatal(err)
		}
	}
}
