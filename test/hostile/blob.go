// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// frame replaces the first chunk of an image's first blob by another frame, with its right digest. The chunk's
// pages stay what they were.
func frame(encode func(pages uint32) []byte) func(*Image) {
	return func(i *Image) {
		x, err := pageindex.Parse(i.pageIndex)
		must(err)
		b := &x.Blobs[0]
		p := encode(b.Chunks[0].Pages)
		blob := join(p, i.Blobs[0][b.Offset(1):])
		chunks := slices.Clone(b.Chunks)
		chunks[0] = pageindex.Chunk{SHA256: sha256.Sum256(p), Size: uint32(len(p)), Pages: chunks[0].Pages}
		*b, err = pageindex.NewBlob(digest.FromBytes(blob), chunks)
		must(err)
		out, err := x.Encode()
		must(err)
		i.Blobs[0], i.PageIndex = blob, func([]byte) []byte { return out }
	}
}

// zstdFrame is a frame that says to have n bytes (RFC 8878, 3.1.1.1.4), and the blocks.
func zstdFrame(n uint32, blocks ...[]byte) []byte {
	out := binary.LittleEndian.AppendUint32([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0}, n)
	return join(append([][]byte{out}, blocks...)...)
}

// blobTricks lie in the memory itself, which is fetched when a process touches it.
func blobTricks() []Trick {
	return []Trick{
		{Name: "frame-of-more-pages", Late: true, Says: "damaged page chunk", Make: frame(func(pages uint32) []byte {
			return zstdFrame((pages+1)*pageSize, block(int(pages+1)*pageSize, 1))
		})},
		{Name: "frame-of-fewer-pages", Late: true, Says: "it decompresses to 4096 bytes instead of", Make: frame(func(uint32) []byte {
			return zstdFrame(pageSize, block(pageSize, 1))
		})},
		{Name: "frame-that-is-a-bomb", Late: true, Says: "damaged page chunk", Make: frame(func(uint32) []byte {
			return zeros(64 << 20)[:900]
		})},
		{Name: "frame-of-a-huge-window", Late: true, Says: "damaged page chunk", Make: frame(func(uint32) []byte {
			return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 31 << 3}, block(pageSize, 1)...)
		})},
		{Name: "frame-that-is-none", Late: true, Says: "magic number mismatch", Make: frame(func(uint32) []byte { return []byte("no zstd frame") })},
		{Name: "two-frames", Late: true, Says: "damaged page chunk", Make: frame(func(pages uint32) []byte {
			return join(zstdFrame(pages*pageSize, block(int(pages)*pageSize, 1)), zstdFrame(pageSize, block(pageSize, 1)))
		})},
		{Name: "pages-other-than-their-digest", Late: true, Says: "its digest is sha256:", Make: func(i *Image) {
			// Zeros, so that no cache has it.
			frame(func(pages uint32) []byte { return zstdFrame(pages*pageSize, block(int(pages)*pageSize, 1)) })(i)
			i.Tampered[kindPages] = func(p []byte) []byte { p[0] ^= 1; return p }
		}},
	}
}
