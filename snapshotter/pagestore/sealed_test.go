// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/seal"
)

// encrypted makes of a fixture one whose chunks are sealed.
func encrypted(t *testing.T, f *fixture, key *seal.Blob) *fixture {
	t.Helper()
	out := &fixture{pages: f.pages}
	var list []pageindex.Chunk
	for i, c := range f.blob.Chunks {
		sealed := key.Seal(nil, f.raw[f.blob.Offset(i):f.blob.Offset(i+1)], i, c.Pages)
		list = append(list, pageindex.Chunk{SHA256: sha256.Sum256(sealed), Size: uint32(len(sealed)), Pages: c.Pages})
		out.raw = append(out.raw, sealed...)
	}
	var err error
	if out.blob, err = pageindex.NewBlob(digest.FromBytes(out.raw), list); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestSealed: who has the key of a blob finds its pages, also those that others fetched; who
// only lists its chunks does not, though they are on the node.
func TestSealed(t *testing.T) {
	key := seal.NewBlob(seal.NewKey())
	f := encrypted(t, newFixture(t, 1, 50), key)
	src := newSource(f)
	s := openStore(t, Options{})
	defer s.Close()
	fetch := func(b *Blob) error { return b.Fetch(context.Background(), src, all(f), Demand) }
	acquire := func(k *seal.Blob) *Blob {
		b, err := s.Acquire(&f.blob, k)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	mine := acquire(key)
	if err := fetch(mine); err != nil {
		t.Fatal(err)
	}
	check(t, mine, f)
	again := acquire(seal.NewBlob(key.Key()))
	if again != mine {
		t.Error("the same blob with the same key is there twice")
	}
	again.Release()
	for name, k := range map[string]*seal.Blob{"no key": nil, "another key": seal.NewBlob(seal.NewKey())} {
		other := acquire(k)
		if n, _ := other.Missing(); n != len(f.blob.Chunks) {
			t.Errorf("%s: %d of %d chunks are missing", name, n, len(f.blob.Chunks))
		}
		if err := fetch(other); !errdefs.IsDataLoss(err) {
			t.Errorf("%s: %v", name, err)
		}
		other.Release()
	}
	dir := filepath.Dir(mine.DataPath())
	if !strings.HasSuffix(dir, sealedSuffix) {
		t.Errorf("the folder is %s", dir)
	}
	for _, when := range []string{"in use", "not in use"} {
		if when == "not in use" {
			mine.Release()
		}
		s.Forget(&f.blob, key)
		if when == "in use" {
			check(t, mine, f)
			again := acquire(key)
			mine.Release()
			again.Release()
			if _, err := os.Stat(dir); err != nil {
				t.Errorf("acquired again and not there: %v", err)
			}
			mine = acquire(key)
			s.Forget(&f.blob, key)
			mine.Release()
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: not forgotten: %v", when, err)
		}
		mine = acquire(key)
	}
	b := mine
	if n, _ := b.Missing(); n != len(f.blob.Chunks) {
		t.Errorf("%d of %d chunks are missing after that", n, len(f.blob.Chunks))
	}
	b.Release()
	plain := newFixture(t, 2, 3)
	p, err := s.Acquire(&plain.blob, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Release()
	s.ForgetSealed()
	if len(s.folders) != 2 { // the plain one, and what asked for the sealed chunks without a key
		t.Errorf("%d folders are left", len(s.folders))
	}
}
