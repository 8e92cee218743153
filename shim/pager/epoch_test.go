// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"fmt"
	"strings"
	"testing"
	"time"

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

// lacking does what [space.lacking] does.
func lacking(child func(uint64) presence) func(*ranges) []span {
	return func(r *ranges) (lacks []span) {
		for _, l := range r.leaves {
			for _, s := range l.segs {
				for a := s.start; a < s.end; a += pageSize {
					if child(a) == absent {
						lacks = append(lacks, span{a, a + pageSize})
					}
				}
			}
		}
		return lacks
	}
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

// What is mapped decides what came before a fork, and where memory went.
func TestOrder(t *testing.T) {
	const n = 4 * pageSize
	const x, y, z = 0x100000, 0x200000, 0x300000
	places := map[string]uint64{"x": x, "y": y, "z": z}
	move := func(from, to uint64) uffd.Event {
		return uffd.Event{Kind: uffd.Remap, Start: from, End: from + n, To: to}
	}
	unmap := func(at uint64) uffd.Event { return uffd.Event{Kind: uffd.Unmap, Start: at, End: at + n} }
	drop := func(at uint64) uffd.Event { return uffd.Event{Kind: uffd.Remove, Start: at, End: at + n} }
	type events = []uffd.Event
	for _, c := range []struct {
		name     string
		base     string // what was wanted
		events   []uffd.Event
		parent   string // what is mapped
		want     string
		read     int // when the fork was reported
		child    string
		inherits string
	}{
		{"no change", "x", nil, "x", "x", 0, "x", "x"},
		{"move, then fork", "x", events{move(x, y), unmap(x)}, "y", "x at y", 2, "y", "x at y"},
		{"fork, then move", "x", events{move(x, y), unmap(x)}, "y", "x at y", 0, "x", "x"},
		{"move, then fork, reported first", "x", events{move(x, y), unmap(x)}, "y", "x at y", 0, "y", "x at y"},
		{"fork, then move, reported last", "x", events{move(x, y), unmap(x)}, "y", "x at y", 2, "x", "x"},
		{"fork within a move", "x", events{move(x, y), unmap(x)}, "y", "x at y", 1, "y", "x at y"},
		{"move that keeps its place, then fork", "x", events{move(x, y)}, "xy", "x at y", 1, "xy", "x at y"},
		{"move that keeps its place, then fork, reported first", "x", events{move(x, y)}, "xy", "x at y", 0, "xy", "x at y"},
		{"fork, then move that keeps its place", "x", events{move(x, y)}, "xy", "x at y", 0, "x", "x"},
		{"fork, then move that keeps its place, reported last", "x", events{move(x, y)}, "xy", "x at y", 1, "x", "x"},
		{"move over another mapping, then fork within", "xy", events{unmap(y), move(x, y), unmap(x)}, "y", "x at y", 1, "y", "x at y"},
		{"fork, then move over another mapping", "xy", events{unmap(y), move(x, y), unmap(x)}, "y", "x at y", 0, "xy", "x y"},
		{"fork, then move over another mapping, reported within", "xy", events{unmap(y), move(x, y), unmap(x)}, "y", "x at y", 1, "xy", "x y"},
		{"unmap of a place, then fork, then move there", "xy", events{unmap(y), move(x, y), unmap(x)}, "y", "x at y", 1, "x", "x"},
		{"move, and growth over the old place, then fork", "x", events{move(x, y), unmap(x)}, "xy", "x at y", 2, "xy", "x at y"},
		{"unmap, then fork", "x", events{unmap(x)}, "", "", 1, "", ""},
		{"unmap, and growth over the place, then fork", "x", events{unmap(x)}, "x", "", 1, "x", ""},
		{"unmap, and growth over the place, then fork, then unmap again", "x", events{unmap(x), unmap(x)}, "", "", 1, "x", ""},
		{"fork, then unmap", "x", events{unmap(x)}, "", "", 0, "x", "x"},
		{"fork, then unmap, reported first", "x", events{unmap(x)}, "", "", 1, "x", "x"},
		{"unmap, then fork, reported first", "x", events{unmap(x)}, "", "", 0, "", ""},
		{"fork, then move and unmap, reported first", "x", events{move(x, y), unmap(x), unmap(y)}, "", "", 3, "x", "x"},
		{"remove, then fork", "x", events{drop(x)}, "x", "", 1, "x", ""},
		{"fork, then remove", "x", events{drop(x)}, "x", "", 0, "x", "x"},
		{"a child that changes its mappings", "x", events{unmap(x)}, "", "", 1, "?", ""},
		{"unmap, then move there", "xy", events{unmap(y), move(x, y), unmap(x)}, "y", "x at y", 3, "y", "x at y"},
		{"unmap, then move there, reported first", "xy", events{move(x, y), unmap(x), unmap(y)}, "y", "x at y", 3, "y", "x at y"},
		{"unmap, then move there, reported before the end of the move", "x", events{move(x, y), unmap(y), unmap(x)}, "y", "x at y", 3, "y", "x at y"},
		{"move, then unmap, and growth over the place", "x", events{move(x, y), unmap(x), unmap(y)}, "y", "", 3, "y", ""},
		{"move, then unmap", "x", events{move(x, y), unmap(x), unmap(y)}, "", "", 3, "", ""},
		{"move away, then move there, reported first", "xy", events{move(x, y), unmap(x), move(y, z), unmap(y)}, "yz", "x at y y at z", 4, "yz", "x at y y at z"},
		{"move, then move on and keep the place", "x", events{move(x, y), unmap(x), move(y, z)}, "yz", "x at z", 3, "yz", "x at z"},
		{"move, then move on", "x", events{move(x, y), unmap(x), move(y, z), unmap(y)}, "z", "x at z", 4, "z", "x at z"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var runs []pageindex.Run
			for i, p := range c.base {
				runs = append(runs, pageindex.Run{Start: places[string(p)], Pages: 4, Page: uint64(10 * (i + 1))})
			}
			e := epoch{base: newRanges(runs), events: c.events}
			looks := func(at string) func(uint64) presence {
				return func(a uint64) presence {
					switch {
					case at == "?":
						return unknown
					case strings.Contains(at, map[uint64]string{x: "x", y: "y", z: "z"}[a&^(n-1)]):
						return mapped
					}
					return absent
				}
			}
			describe := func(r ranges) string {
				var out []string
				for i, p := range c.base {
					for _, q := range "xyz" {
						switch {
						case at(r, places[string(q)]) != fmt.Sprint(10*(i+1)):
						case p == q:
							out = append(out, string(p))
						default:
							out = append(out, string(p)+" at "+string(q))
						}
					}
				}
				return strings.Join(out, " ")
			}
			order, wanted := e.order()
			if got := describe(wanted); got != c.want {
				t.Errorf("wanted: %q, want %q", got, c.want)
			}
			if got := describe(e.inherited(order, c.read, looks(c.parent), looks(c.child), lacking(looks(c.child)))); got != c.inherits {
				t.Errorf("inherited: %q, want %q", got, c.inherits)
			}
		})
	}
}

// Pieces of what was wanted take ways of their own.
func TestTracks(t *testing.T) {
	const x, y, z, n = 0x100000, 0x200000, 0x300000, 8 * pageSize
	e := epoch{
		base: newRanges([]pageindex.Run{{Start: x, Pages: 2, Page: 10}, {Start: x + 4*pageSize, Pages: 4, Page: 14}}),
		events: []uffd.Event{
			{Kind: uffd.Remap, Start: x, End: x + n, To: y},
			{Kind: uffd.Unmap, Start: x, End: x + n},
			{Kind: uffd.Unmap, Start: y + pageSize, End: y + 5*pageSize},
			{Kind: uffd.Remap, Start: y + 6*pageSize, End: y + n, To: z},
		},
	}
	none := func(uint64) presence { return unknown }
	order, wanted := e.order()
	for _, r := range []ranges{wanted, e.inherited(order, len(e.events), none, none, lacking(none))} {
		for _, c := range []struct {
			at   uint64
			want string
		}{{y, "10"}, {y + pageSize, "zero"}, {y + 4*pageSize, "zero"}, {y + 5*pageSize, "15"}, {y + 6*pageSize, "zero"}, {z, "16"}, {z + pageSize, "17"}, {x, "zero"}} {
			if got := at(r, c.at); got != c.want {
				t.Errorf("%#x: %s, want %s", c.at, got, c.want)
			}
		}
		if r.pages != 4 {
			t.Errorf("%d pages", r.pages)
		}
	}
}

// What is in the middle of a piece may have gone another way.
func TestTracksWithHoles(t *testing.T) {
	const x, y, n = 0x100000, 0x200000, 8 * pageSize
	e := epoch{
		base: newRanges([]pageindex.Run{{Start: x, Pages: 8, Page: 10}}),
		events: []uffd.Event{
			{Kind: uffd.Remap, Start: x + 2*pageSize, End: x + 4*pageSize, To: y},
			{Kind: uffd.Unmap, Start: x + 2*pageSize, End: x + 4*pageSize},
			{Kind: uffd.Remove, Start: x, End: x + 6*pageSize},
			{Kind: uffd.Unmap, Start: x + pageSize, End: x + n},
		},
	}
	mappedAt := func(lo, hi uint64) func(uint64) presence {
		return func(a uint64) presence {
			if lo <= a && a < hi && (a < x+2*pageSize || a >= x+4*pageSize) || y <= a && a < y+2*pageSize {
				return mapped
			}
			return absent
		}
	}
	parent := mappedAt(x, x+pageSize)
	order, _ := e.order()
	r := e.inherited(order, 2, parent, mappedAt(x, x+n), lacking(mappedAt(x, x+n)))
	for _, c := range []struct {
		at   uint64
		want string
	}{{x, "10"}, {x + pageSize, "11"}, {x + 2*pageSize, "zero"}, {x + 4*pageSize, "14"}, {x + 7*pageSize, "17"}, {y, "12"}, {y + pageSize, "13"}} {
		if got := at(r, c.at); got != c.want {
			t.Errorf("%#x: %s, want %s", c.at, got, c.want)
		}
	}
	if r.pages != 8 {
		t.Errorf("%d pages", r.pages)
	}
}

// What a child did not inherit says nothing about what is beside it.
func TestTracksInPartNotInherited(t *testing.T) {
	const x, y, n = 0x100000, 0x200000, 8 * pageSize
	base := newRanges([]pageindex.Run{{Start: x, Pages: 8, Page: 10}})
	unmap := func(at uint64) uffd.Event { return uffd.Event{Kind: uffd.Unmap, Start: at, End: at + n} }
	for name, c := range map[string]struct {
		events []uffd.Event
		read   int
		at     uint64
	}{
		"fork, then unmap":             {[]uffd.Event{unmap(x)}, 0, x},
		"move, then fork, then unmap":  {[]uffd.Event{{Kind: uffd.Remap, Start: x, End: x + n, To: y}, unmap(x), unmap(y)}, 2, y},
		"fork, then unmap, other way":  {[]uffd.Event{unmap(x)}, 1, x},
		"fork, then move, then unmaps": {[]uffd.Event{{Kind: uffd.Remap, Start: x, End: x + n, To: y}, unmap(x), unmap(y)}, 0, x},
	} {
		e := epoch{base: base, events: c.events}
		lacks := []span{{c.at, c.at + 2*pageSize}, {c.at + 5*pageSize, c.at + 6*pageSize}}
		child := func(a uint64) presence {
			if a < c.at || a >= c.at+n {
				return absent
			}
			for _, l := range lacks {
				if l.start <= a && a < l.end {
					return absent
				}
			}
			return mapped
		}
		order, _ := e.order()
		r := e.inherited(order, c.read, func(uint64) presence { return absent }, child, lacking(child))
		for _, page := range []uint64{2, 4, 6, 7} {
			if got, want := at(r, c.at+page*pageSize), fmt.Sprint(10+page); got != want {
				t.Errorf("%s: page %d: %s", name, page, got)
			}
		}
	}
}

// While the order is in doubt nothing is filled.
func TestNothingIsFilledInDoubt(t *testing.T) {
	const x, y, n = 0x100000, 0x200000, 4 * pageSize
	p, s := applied(t, newRanges([]pageindex.Run{{Start: x, Pages: 4, Page: 10}, {Start: y, Pages: 4, Page: 20}}),
		uffd.Event{Kind: uffd.Remap, Start: x, End: x + n, To: y})
	if !s.recent.doubt || !p.loop.restless[s] {
		t.Error("no doubt about a move to where something was")
	}
	if _, err := p.zero(s, x, x+n); err != unix.EAGAIN {
		t.Error(err)
	}
	if _, err := p.copy(s, segment{start: y, end: y + n, page: 10}, y, y+n); err != unix.EAGAIN {
		t.Error(err)
	}
}
