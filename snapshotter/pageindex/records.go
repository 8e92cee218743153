// SPDX-License-Identifier: Apache-2.0

package pageindex

import (
	"slices"
	"unsafe"
)

// A chunk's record is the Chunk itself as it lies in memory on little-endian machines, the only ones that thaw runs on. An index
// is mostly records, and a restore waits for its index: they are taken as they are, not one after the other.
const chunkRecord = int(unsafe.Sizeof(Chunk{}))

// chunksOf returns the chunks of whole records. They lie in the records if these are aligned, else in a copy.
func chunksOf(records []byte) []Chunk {
	if len(records) == 0 {
		return nil
	}
	if uintptr(unsafe.Pointer(unsafe.SliceData(records)))%unsafe.Alignof(Chunk{}) != 0 {
		chunks := make([]Chunk, len(records)/chunkRecord)
		copy(recordsOf(chunks), records)
		return chunks
	}
	return slices.Clip(unsafe.Slice((*Chunk)(unsafe.Pointer(unsafe.SliceData(records))), len(records)/chunkRecord))
}

// recordsOf returns the records of chunks.
func recordsOf(chunks []Chunk) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(chunks))), len(chunks)*chunkRecord)
}
