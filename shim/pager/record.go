// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"slices"
	"sync"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// MaxRecorded bounds a recorded working set. What comes later is not needed
// for a quick start.
const MaxRecorded = 1 << 16

// record keeps the chunks in the order of their first fault.
type record struct {
	mu    sync.Mutex
	order []Chunk
	seen  chunkSet // of the loop alone
}

// chunkSet has a bit for each chunk of each blob.
type chunkSet [][]uint64

func newChunkSet(x *pageindex.Index) chunkSet {
	s := make(chunkSet, len(x.Blobs))
	for i := range x.Blobs {
		s[i] = make([]uint64, (len(x.Blobs[i].Chunks)+63)/64)
	}
	return s
}

func (s chunkSet) has(blob int32, chunk int) bool { return s[blob][chunk/64]>>(chunk%64)&1 == 1 }

// add tells whether a chunk was not in the set.
func (s chunkSet) add(blob int32, chunk int) bool {
	word, bit := &s[blob][chunk/64], uint64(1)<<(chunk%64)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	return true
}

// touch tells whether it is the chunk's first one.
func (r *record) touch(blob int32, chunk int) bool {
	if !r.seen.add(blob, chunk) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.order) < MaxRecorded {
		r.order = append(r.order, Chunk{uint32(blob), uint32(chunk)})
	}
	return true
}

func (r *record) list() []Chunk {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.order)
}
