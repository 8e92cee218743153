// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"math/rand/v2"
	"testing"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// model is what ranges promises, page by page: blob and page of each address.
type model map[uint64]segment

func (m model) put(s segment) {
	for a := s.start; a < s.end; a += pageSize {
		m[a] = s.from(a).to(a + pageSize)
	}
}

func (m model) take(lo, hi uint64) model {
	out := model{}
	for a := lo; a < hi; a += pageSize {
		if s, ok := m[a]; ok {
			out[a] = s
			delete(m, a)
		}
	}
	return out
}

func (m model) move(lo, hi, to uint64) {
	moved := m.take(lo, hi)
	m.take(to, to+hi-lo)
	for a, s := range moved {
		b := a - lo + to
		s.start, s.end = b, b+pageSize
		m[b] = s
	}
}

func (m model) clone() model {
	out := model{}
	for a, s := range m {
		out[a] = s
	}
	return out
}

// check compares all, and that the promises about order and size hold.
func check(t *testing.T, r *ranges, m model) {
	t.Helper()
	end, pages := uint64(0), uint64(0)
	for _, l := range r.leaves {
		if len(l.segs) == 0 || len(l.segs) > leafSize {
			t.Fatalf("leaf of %d segments", len(l.segs))
		}
		for _, s := range l.segs {
			if s.start < end || s.end <= s.start {
				t.Fatalf("segment %#x-%#x behind %#x", s.start, s.end, end)
			}
			end = s.end
			for a := s.start; a < s.end; a += pageSize {
				if m[a] != s.from(a).to(a+pageSize) {
					t.Fatalf("page %#x is %+v, want %+v", a, s.from(a), m[a])
				}
				pages++
			}
		}
	}
	if pages != uint64(len(m)) || pages != r.pages {
		t.Fatalf("%d pages, counted %d, want %d", pages, r.pages, len(m))
	}
}

func TestRangesAgainstModel(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var runs []pageindex.Run
		m := model{}
		at := uint64(16)
		for range 600 {
			at += rnd.Uint64N(3)
			run := pageindex.Run{Start: at * pageSize, Pages: 1 + rnd.Uint64N(12), Blob: int(rnd.IntN(3)) - 1}
			if run.Blob != pageindex.Zero {
				run.Page = rnd.Uint64N(1000)
			}
			at += run.Pages
			runs = append(runs, run)
			m.put(segment{start: run.Start, end: run.End(), page: run.Page, blob: int32(run.Blob)})
		}
		r := newRanges(runs)
		check(t, &r, m)
		type pair struct {
			r ranges
			m model
		}
		copies := []*pair{{r, m}}
		for step := range 3000 {
			p := copies[rnd.IntN(len(copies))]
			lo := (8 + rnd.Uint64N(at)) * pageSize
			hi := lo + (1+rnd.Uint64N(1<<rnd.IntN(9)))*pageSize
			switch rnd.IntN(20) {
			case 0:
				to := (8 + rnd.Uint64N(2*at)) * pageSize
				if to < hi && lo < to+hi-lo {
					continue // mremap refuses places that overlap
				}
				p.r.move(lo, hi, to)
				p.m.move(lo, hi, to)
			case 1:
				if len(copies) < 5 {
					copies = append(copies, &pair{p.r.clone(), p.m.clone()})
				}
			default:
				hi = min(hi, lo+4*pageSize)
				taken, n := p.r.remove(lo, hi, true)
				want := p.m.take(lo, hi)
				got := model{}
				for _, s := range taken {
					got.put(s)
				}
				if uint64(len(want)) != n || len(got) != len(want) {
					t.Fatalf("seed %d step %d: removed %d pages, %d in parts, want %d", seed, step, n, len(got), len(want))
				}
				for a, s := range want {
					if got[a] != s {
						t.Fatalf("removed %+v, want %+v", got[a], s)
					}
				}
			}
			a := rnd.Uint64N(2*at) * pageSize
			s, ok := p.r.next(a)
			if ok && s.end <= a {
				t.Fatalf("next(%#x) is %#x-%#x", a, s.start, s.end)
			}
			if w, in := p.m[a]; in && (!ok || s.from(a).to(a+pageSize) != w) {
				t.Fatalf("next(%#x) is %+v, want %+v", a, s, w)
			}
			if step%100 == 0 {
				for _, p := range copies {
					check(t, &p.r, p.m)
				}
			}
		}
		for _, p := range copies {
			check(t, &p.r, p.m)
			p.r.remove(0, 1<<56, false)
			check(t, &p.r, model{})
		}
	}
}

// A copy of a large set costs next to nothing until it changes.
func TestRangesCopyShares(t *testing.T) {
	runs := make([]pageindex.Run, 100_000)
	for i := range runs {
		runs[i] = pageindex.Run{Start: uint64(2*i+1) * pageSize, Pages: 1, Blob: pageindex.Zero}
	}
	r := newRanges(runs)
	n := testing.AllocsPerRun(10, func() {
		c := r.clone()
		c.remove(pageSize, 2*pageSize, false)
	})
	if n > 4 {
		t.Errorf("%v allocations for a copy", n)
	}
}

func BenchmarkRangesRemove(b *testing.B) {
	runs := []pageindex.Run{{Start: 1 << 32, Pages: 1 << 26, Blob: 0}}
	r := newRanges(runs)
	rnd := rand.New(rand.NewPCG(1, 1))
	for b.Loop() {
		a := 1<<32 + rnd.Uint64N(1<<22)*16*pageSize
		r.remove(a, a+16*pageSize, false)
	}
}
