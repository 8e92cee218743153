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
	seen  [][]uint64 // a bit for each chunk of each blob; of the loop alone
}

func (r *record) init(x *pageindex.Index) {
	r.seen = make([][]uint64, len(x.Blobs))
	for i := range x.Blobs {
		r.seen[i] = make([]uint64, (len(x.Blobs[i].Chunks)+63)/64)
	}
}

// touch tells whether it is the chunk's first one.
func (r *record) touch(blob int32, chunk int) bool {
	word, bit := &r.seen[blob][chunk/64], uint64(1)<<(chunk%64)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
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
