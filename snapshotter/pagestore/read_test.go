// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"bytes"
	"testing"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/snapshotter/pageindex"
)

func TestReadPages(t *testing.T) {
	f := newFixture(t, 15, 5)
	s := openStore(t, Options{})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	if err := b.Fetch(t.Context(), newSource(f), []int{0, 1, 3}, Demand); err != nil {
		t.Fatal(err)
	}
	size := func(pages uint64) []byte { return make([]byte, pages*pageindex.PageSize) }
	// Over the border of two chunks that are there.
	p := size(2)
	at := f.blob.FirstPage(1) - 1
	if err := b.ReadPages(at, p); err != nil || !bytes.Equal(p, f.pages[at*pageindex.PageSize:][:len(p)]) {
		t.Error(err)
	}
	// Into one that is not.
	if err := b.ReadPages(f.blob.FirstPage(2)-1, size(2)); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("got %v", err)
	}
	for _, c := range []struct {
		page uint64
		p    []byte
	}{
		{0, nil},
		{0, make([]byte, 100)},
		{f.blob.Pages(), size(1)},
		{f.blob.FirstPage(3), size(f.blob.Pages())},
		{1 << 63, size(1)},
	} {
		if err := b.ReadPages(c.page, c.p); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%d bytes from page %d: %v", len(c.p), c.page, err)
		}
	}
}
