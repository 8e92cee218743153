// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// chunksOf returns all chunks of an index, in random order.
func chunksOf(c *checkpoint, seed uint64) (list []Chunk) {
	for b := range c.index.Blobs {
		for i := range c.index.Blobs[b].Chunks {
			list = append(list, Chunk{uint32(b), uint32(i)})
		}
	}
	rand.New(rand.NewPCG(seed, 3)).Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

// eventually waits until something that nobody tells of is true.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	limit := time.After(time.Minute)
	for !is() {
		select {
		case <-pace.C:
		case <-limit:
			t.Fatal(what)
		}
	}
}

// TestExpect: what is expected is filled before it is touched, whether it is in the
// page store already or has to be fetched; what is not in the checkpoint is
// ignored.
func TestExpect(t *testing.T) {
	for name, present := range map[string]bool{"present": true, "fetched": false} {
		t.Run(name, func(t *testing.T) {
			const pages = 4096
			cp := makeCheckpoint(t, pages, 32, false, 1)
			if present {
				cp.putAll(t)
			}
			v := startVictim(t, pages, "read", 1, 0)
			p := startPager(t, cp, slow{cp, 0}, Lazy, nil, v)
			_, stored := cp.index.Processes[0].Pages()
			p.Expect(append([]Chunk{{2, 0}, {0, 1 << 30}, {1 << 31, 7}}, chunksOf(cp, 1)...))
			eventually(t, "what is expected is not filled", func() bool { return p.Stats().CopiedPages == stored })
			v.run(time.Minute) // which checks each page
			if s := p.Stats(); s.RemoteFaults != 0 || s.CopiedPages != stored {
				t.Errorf("%+v", s)
			}
			for k, n := range cp.fetched {
				if n > 1 {
					t.Errorf("%+v was fetched %d times", k, n)
				}
			}
			if got := len(p.WorkingSet()); got != len(chunksOf(cp, 1)) {
				t.Errorf("%d chunks count as touched", got)
			}
		})
	}
}

// TestExpectedIsAway: that chunks cannot be had before somebody waits for them is no
// error; when somebody does, they are asked for again.
func TestExpectedIsAway(t *testing.T) {
	const pages = 1024
	cp := makeCheckpoint(t, pages, 32, false, 1)
	v := startVictim(t, pages, "read", 1, 0)
	f := fetchFunc(func(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error {
		if u != Demand {
			return errors.New("away")
		}
		return slow{cp, 0}.Fetch(ctx, blob, chunks, u)
	})
	p := startPager(t, cp, f, Lazy, nil, v)
	p.Expect(chunksOf(cp, 1))
	v.run(time.Minute)
	if s := p.Stats(); s.State == "failed" || s.RemoteFaults == 0 {
		t.Errorf("%+v", s)
	}
}

// TestExpectedIsGone: a chunk that was there when it was expected, and is not in the store that was made anew since, is not filled
// with what a hole in that store's file reads as.
func TestExpectedIsGone(t *testing.T) {
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	p := &Pager{cfg: Config{Index: cp.index}}
	for i := range cp.stores {
		st, err := openStore(cp.stores[i], &cp.index.Blobs[i])
		if err != nil {
			t.Fatal(err)
		}
		defer st.close()
		p.stores = append(p.stores, st)
	}
	p.loop.init(p)
	p.loop.restored = true
	const nowhere = -1 // filling would be an error
	s := &space{fd: nowhere, pid: testPID, wanted: newRanges(cp.index.Processes[0].Runs), pending: map[uint64]waiting{}}
	p.loop.spaces[nowhere] = s
	wanted, c := s.wanted.pages, Chunk{0, 0}
	p.loop.ahead.places = p.placesOf([]Chunk{c})
	place := p.loop.ahead.places[c][0]
	p.loop.ahead.ready = []Chunk{c}
	if err := p.fillExpected(); err != nil || len(p.loop.ahead.ready) != 0 || s.wanted.pages != wanted {
		t.Errorf("%v; %d chunks are ready, %d pages of %d wanted", err, len(p.loop.ahead.ready), s.wanted.pages, wanted)
	}
	// And should anybody else try:
	seg, _ := s.wanted.next(place.start)
	if n, err := p.copy(s, seg, place.start, place.start+pageSize); n != 0 || err == nil || !strings.Contains(err.Error(), "not there") {
		t.Errorf("copy of a page that is not there: %d, %v", n, err)
	}
}
