// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"crypto/sha256"
	"math/rand/v2"
	"testing"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// BenchmarkFill is what verifying, decoding and storing costs without a network:
// 64 MiB in chunks of the size that checkpoints have.
func BenchmarkFill(b *testing.B) {
	for name, alphabet := range map[string]int{"incompressible": 256, "compressible": 4} {
		b.Run(name, func(b *testing.B) {
			f := &fixture{}
			r := rand.New(rand.NewPCG(1, 1))
			var list []pageindex.Chunk
			p := make([]byte, pageblob.ChunkPages*pageindex.PageSize)
			for range 64 << 20 / len(p) {
				for i := range p {
					p[i] = byte(r.IntN(alphabet))
				}
				frame, err := pageblob.Encode(nil, p)
				if err != nil {
					b.Fatal(err)
				}
				list = append(list, pageindex.Chunk{SHA256: sha256.Sum256(frame), Size: uint32(len(frame)), Pages: pageblob.ChunkPages})
				f.raw = append(f.raw, frame...)
			}
			var err error
			if f.blob, err = pageindex.NewBlob(digest.FromBytes(f.raw), list); err != nil {
				b.Fatal(err)
			}
			src := newSource(f)
			b.SetBytes(64 << 20)
			for b.Loop() {
				b.StopTimer()
				s := openStore(b, Options{Dir: b.TempDir(), Parallel: 8, RequestSize: 2 << 20})
				blob := acquire(b, s, f)
				b.StartTimer()
				if err := blob.Fill(b.Context(), src); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				blob.Release()
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
