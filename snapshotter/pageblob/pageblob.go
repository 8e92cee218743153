// SPDX-License-Identifier: Apache-2.0

// Package pageblob writes and reads page blobs: the layers of a checkpoint image
// that hold memory.
//
// A page blob is a concatenation of chunks. A chunk is one zstd frame that
// decompresses to at most ChunkPages whole pages and depends on nothing before
// it, so that it can be fetched, verified and cached alone. Since zstd decoders
// accept concatenated frames, the whole blob is a valid zstd stream too. In an encrypted
// blob each frame is sealed (package seal).
//
// Encode and Decode are for one chunk. A Writer turns the pages of processes
// into blobs and the page index that belongs to them. docs/image-format.md
// specifies the format and the rules by which pages are cut into chunks.
package pageblob

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/seal"
)

const (
	// ChunkPages is the most pages that a Writer puts into one chunk: 128 KiB.
	// Larger chunks compress a little better, but a fault waits for the whole
	// chunk to arrive, and neighbours of a page are touched less often the
	// farther away they are.
	ChunkPages = 32

	// level was chosen by BenchmarkEncode on the memory of a Python process full
	// of dicts, on one core: fastest 660 MB/s at ratio 11.6, default 600 at
	// 12.0, better 310 at 12.2, best 60 at 13.5. The level is no part of the
	// format, but after a change no chunk of an earlier checkpoint is reused.
	level = zstd.SpeedDefault
)

// ErrDamaged is wrapped by errors of Decode: what was given is not the chunk.
var ErrDamaged = errors.New("damaged page chunk")

// coder holds the encoder and decoder of the process. Both may be used
// concurrently, and hold memory in proportion to that concurrency only.
type coder struct {
	enc *zstd.Encoder
	dec *zstd.Decoder
}

var shared = sync.OnceValue(func() coder {
	n := runtime.GOMAXPROCS(0)
	enc, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(level),
		zstd.WithEncoderConcurrency(n),
		// The smallest window that holds a whole chunk. Frames shorter than it
		// have the single-segment flag, so decoders need no window of their own.
		zstd.WithWindowSize(ChunkPages*pageindex.PageSize),
		zstd.WithEncoderCRC(false), // chunks are verified by SHA-256
		zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic("zstd encoder options: " + err.Error()) // constants above: cannot fail
	}
	dec, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(n),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(pageindex.MaxChunkPages*pageindex.PageSize),
		zstd.WithDecodeAllCapLimit(true)) // never more than dst has room for
	if err != nil {
		panic("zstd decoder options: " + err.Error())
	}
	return coder{enc, dec}
})

// Encode appends the frame of a chunk to dst. The content must be 1 to
// pageindex.MaxChunkPages whole pages. The same content gives the same frame.
// Safe for concurrent use.
func Encode(dst, content []byte) ([]byte, error) {
	n := len(content) / pageindex.PageSize
	if n == 0 || n > pageindex.MaxChunkPages || len(content)%pageindex.PageSize != 0 {
		return nil, fmt.Errorf("a chunk cannot be made of %d bytes: 1 to %d pages of %d are needed", len(content), pageindex.MaxChunkPages, pageindex.PageSize)
	}
	return shared().enc.EncodeAll(content, dst), nil
}

// Decode checks a frame against what the page index says of the chunk and
// decompresses it into dst, whose length must be that of the chunk's pages.
// Nothing is decompressed before length and digest have matched, and nothing is
// ever written beyond dst. After an error, dst's content is undefined. Errors
// wrap ErrDamaged. Safe for concurrent use.
func Decode(dst []byte, c pageindex.Chunk, frame []byte) error {
	if err := verify(dst, c, frame); err != nil {
		return err
	}
	return decompress(dst, frame)
}

// DecodeSealed does the same for a chunk of an encrypted blob, whose number in the blob it
// must be told. The content of sealed is undefined afterwards.
func DecodeSealed(dst []byte, c pageindex.Chunk, sealed []byte, key *seal.Blob, number int) error {
	if err := verify(dst, c, sealed); err != nil {
		return err
	}
	frame, err := key.Open(sealed, number, c.Pages)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return decompress(dst, frame)
}

// verify compares a chunk with what the page index says of it.
func verify(dst []byte, c pageindex.Chunk, frame []byte) error {
	want := int(c.Pages) * pageindex.PageSize
	if c.Pages == 0 || c.Pages > pageindex.MaxChunkPages || len(dst) != want {
		return fmt.Errorf("%w: room for %d bytes was given for %d pages", ErrDamaged, len(dst), c.Pages)
	}
	if len(frame) != int(c.Size) {
		return fmt.Errorf("%w: it has %d bytes instead of %d", ErrDamaged, len(frame), c.Size)
	}
	if sum := sha256.Sum256(frame); sum != c.SHA256 {
		return fmt.Errorf("%w: its digest is sha256:%x instead of sha256:%x", ErrDamaged, sum, c.SHA256)
	}
	return nil
}

// decompress fills dst with the content of a frame, which may be hostile.
func decompress(dst, frame []byte) error {
	out, err := shared().dec.DecodeAll(frame, dst[:0:len(dst)])
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if len(out) != len(dst) {
		return fmt.Errorf("%w: it decompresses to %d bytes instead of %d", ErrDamaged, len(out), len(dst))
	}
	return nil
}
