// SPDX-License-Identifier: Apache-2.0

// Package workingset has the form of a working set: the chunks that a restored
// container touched first, in the order of their first touch. It also keeps the
// sets of a node, one for each checkpoint.
//
// A set is advice. What is wrong in one costs time: chunks that do not exist are
// passed over, chunks that are not needed are fetched in vain, chunks that lack
// are fetched when they are touched. docs/image-format.md specifies the encoding
// and how sets are published beside an image.
package workingset

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
)

const (
	// ArtifactType is the artifactType of a published set's manifest, whose
	// subject is the index of the checkpoint image.
	ArtifactType = "application/vnd.thaw.workingset.v1"
	// MediaType is that of its only layer, which is an encoded set.
	MediaType = "application/vnd.thaw.workingset.chunks.v1"

	// MaxChunks bounds a set: with chunks of 128 KiB it is 1 GiB of memory.
	// What is touched after so much is not needed for a quick start.
	MaxChunks = 8192
	// MaxEncodedSize bounds an encoded set in bytes: each chunk a run of its own,
	// of three numbers of at most five bytes.
	MaxEncodedSize = headerSize + 15*MaxChunks

	magic      = "THAWWSET"
	major      = 1
	minor      = 0
	headerSize = len(magic) + 2 + 2 + 4 + 32 + 4

	flagPartial = 1
)

// ErrFormat means that something is no working set that this version can read.
var ErrFormat = errors.New("invalid working set")

// Chunk names a chunk of a page index: of which blob, and which of its chunks.
type Chunk struct{ Blob, Chunk uint32 }

// Set is a working set.
type Set struct {
	// Checkpoint is the digest of the checkpoint manifest whose page index the
	// chunks are of.
	Checkpoint digest.Digest
	// Partial says that the recording was cut short: the container ended, or its
	// memory was filled, before it had been quiet.
	Partial bool
	// Chunks are in the order of their first touch, each once.
	Chunks []Chunk
}

// Encode encodes a set. Chunks beyond MaxChunks are left out.
func (s *Set) Encode() ([]byte, error) {
	sum, err := hex.DecodeString(s.Checkpoint.Encoded())
	if s.Checkpoint.Validate() != nil || s.Checkpoint.Algorithm() != digest.SHA256 || err != nil {
		return nil, fmt.Errorf("%w: checkpoint %.80q has no SHA-256 digest", ErrFormat, s.Checkpoint)
	}
	var runs uint32
	var body []byte
	chunks := s.Chunks[:min(len(s.Chunks), MaxChunks)]
	for len(chunks) > 0 {
		first, n := chunks[0], 1
		for n < len(chunks) && chunks[n].Blob == first.Blob && chunks[n].Chunk == first.Chunk+uint32(n) && chunks[n].Chunk > first.Chunk {
			n++
		}
		body = binary.AppendUvarint(body, uint64(first.Blob))
		body = binary.AppendUvarint(body, uint64(first.Chunk))
		body = binary.AppendUvarint(body, uint64(n))
		chunks = chunks[n:]
		runs++
	}
	var flags uint32
	if s.Partial {
		flags |= flagPartial
	}
	out := append(make([]byte, 0, headerSize+len(body)), magic...)
	out = binary.LittleEndian.AppendUint16(out, major)
	out = binary.LittleEndian.AppendUint16(out, minor)
	out = binary.LittleEndian.AppendUint32(out, flags)
	out = append(out, sum...)
	out = binary.LittleEndian.AppendUint32(out, runs)
	return append(out, body...), nil
}

// Parse decodes a set. Another major version, more than MaxChunks chunks and
// anything that is damaged are ErrFormat.
func Parse(p []byte) (*Set, error) {
	if len(p) < headerSize || string(p[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: it does not begin with %q", ErrFormat, magic)
	}
	if len(p) > MaxEncodedSize {
		return nil, fmt.Errorf("%w: %d bytes, allowed are %d", ErrFormat, len(p), MaxEncodedSize)
	}
	p = p[len(magic):]
	if v := binary.LittleEndian.Uint16(p); v != major {
		return nil, fmt.Errorf("%w: version %d, this thaw reads version %d", ErrFormat, v, major)
	}
	s := &Set{
		Partial:    binary.LittleEndian.Uint32(p[4:])&flagPartial != 0,
		Checkpoint: digest.NewDigestFromBytes(digest.SHA256, p[8:40]),
	}
	runs := binary.LittleEndian.Uint32(p[40:])
	p = p[44:]
	number := func() (uint64, bool) {
		v, n := binary.Uvarint(p)
		if n <= 0 || v > 1<<32-1 {
			return 0, false
		}
		p = p[n:]
		return v, true
	}
	for range runs {
		blob, ok1 := number()
		first, ok2 := number()
		n, ok3 := number()
		if !ok1 || !ok2 || !ok3 || n == 0 || first+n > 1<<32 {
			return nil, fmt.Errorf("%w: damaged run of chunks", ErrFormat)
		}
		if n > uint64(MaxChunks-len(s.Chunks)) {
			return nil, fmt.Errorf("%w: more than %d chunks", ErrFormat, MaxChunks)
		}
		for i := range n {
			s.Chunks = append(s.Chunks, Chunk{uint32(blob), uint32(first + i)})
		}
	}
	if len(p) > 0 {
		return nil, fmt.Errorf("%w: %d bytes behind its end", ErrFormat, len(p))
	}
	return s, nil
}

// Within returns the chunks that a page index has, each once, in the set's order.
func (s *Set) Within(x *pageindex.Index) []Chunk {
	out := make([]Chunk, 0, len(s.Chunks))
	seen := make(map[Chunk]bool, len(s.Chunks))
	for _, c := range s.Chunks {
		if uint64(c.Blob) < uint64(len(x.Blobs)) && uint64(c.Chunk) < uint64(len(x.Blobs[c.Blob].Chunks)) && !seen[c] {
			seen[c] = true
			out = append(out, c)
		}
	}
	return out
}
