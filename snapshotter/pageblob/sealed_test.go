// SPDX-License-Identifier: Apache-2.0

package pageblob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/seal"
)

// kept is a sink that keeps what it is given.
type kept struct{ bytes.Buffer }

func (*kept) Commit(digest.Digest, int64) error { return nil }
func (*kept) Abort(error)                       {}

// TestSealed: an encrypted blob has no page's content, each chunk opens alone with the blob's key and
// at its place only, and what is there twice is stored once.
func TestSealed(t *testing.T) {
	var sinks []*kept
	w := NewWriter(context.Background(), Options{Seal: true, MaxBlob: 100 << 10, Open: func() (Sink, error) {
		sinks = append(sinks, &kept{})
		return sinks[len(sinks)-1], nil
	}})
	const marker = "the secret of the process"
	content := memory(96, 1)
	for i := 0; i < len(content); i += pageSize {
		copy(content[i+pageSize/2:], marker)
	}
	for pid := range uint32(2) { // the second is a child that shares all
		if err := errors.Join(w.Begin(pid+1), w.Add(0x100000, content)); err != nil {
			t.Fatal(err)
		}
	}
	x, fresh, stats, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	keys := w.Keys()
	if len(keys) != len(x.Blobs) || fresh != len(x.Blobs) || len(x.Blobs) < 2 || stats.Repeated != int64(len(content)) {
		t.Fatalf("%d keys, %d of %d blobs are new, %+v", len(keys), fresh, len(x.Blobs), stats)
	}
	var got []byte
	for i := range x.Blobs {
		b := &x.Blobs[i]
		raw := sinks[i].Bytes()
		if bytes.Contains(raw, []byte(marker)) || b.Digest != digest.FromBytes(raw) || b.Size() != int64(len(raw)) {
			t.Fatalf("blob %d: plain text in it, or it is another than the index says", i)
		}
		for n, c := range b.Chunks {
			sealed := func() []byte { return bytes.Clone(raw[b.Offset(n):b.Offset(n+1)]) }
			pages := make([]byte, c.Pages*pageSize)
			if err := DecodeSealed(pages, c, sealed(), keys[i], n); err != nil {
				t.Fatalf("blob %d, chunk %d: %v", i, n, err)
			}
			got = append(got, pages...)
			damaged := sealed()
			damaged[len(damaged)-1] ^= 1
			for why, err := range map[string]error{
				"its digest is":    DecodeSealed(pages, c, damaged, keys[i], n),
				"does not open":    DecodeSealed(pages, c, sealed(), keys[i], n+1),
				"was changed":      DecodeSealed(pages, c, sealed(), seal.NewBlob(seal.NewKey()), n),
				"damaged page":     Decode(pages, c, sealed()),
				"instead of":       DecodeSealed(pages, c, sealed()[1:], keys[i], n),
				"room for 0 bytes": DecodeSealed(nil, c, sealed(), keys[i], n),
			} {
				if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), why) {
					t.Errorf("blob %d, chunk %d: %v, want %q", i, n, err, why)
				}
			}
		}
	}
	if !bytes.Equal(got, content) {
		t.Error("other pages came back")
	}
}

func BenchmarkDecodeSealed(b *testing.B) {
	c, frame := chunkOf(b, memory(ChunkPages, 1))
	key := seal.NewBlob(seal.NewKey())
	sealed := key.Seal(nil, frame, 0, c.Pages)
	c.Size, c.SHA256 = uint32(len(sealed)), sha256.Sum256(sealed)
	dst, buf := make([]byte, ChunkPages*pageSize), make([]byte, len(sealed))
	b.SetBytes(int64(len(dst)))
	for b.Loop() {
		copy(buf, sealed)
		if err := DecodeSealed(dst, c, buf, key, 0); err != nil {
			b.Fatal(err)
		}
	}
}
