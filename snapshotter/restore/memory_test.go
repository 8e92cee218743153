// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/criu/pageserver"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
)

var _ pageserver.Source = (*Memory)(nil)

// memory opens the memory of a pushed sample.
func (n *node) memory(s *sample) (*Memory, error) {
	n.t.Helper()
	p, err := n.images.Content(context.Background(), "", s.indexDesc)
	if err != nil {
		n.t.Fatal(err)
	}
	var index v1.Index
	if err := json.Unmarshal(p, &index); err != nil {
		n.t.Fatal(err)
	}
	manifest, err := checkpoint.Find(&index)
	if err != nil {
		n.t.Fatal(err)
	}
	return n.manager.Memory(context.Background(), "registry.test/"+imageName, manifest)
}

func TestMemory(t *testing.T) {
	n := newNode(t)
	s := newSample(t)
	n.push(s)
	m, err := n.memory(s)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	if _, err := os.Stat(filepath.Join(m.ImagesDir(), "pagemap-1.img")); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		pid     uint32
		address uint64
		count   int
		want    []int // content of page; -1 is zero
	}{
		{1, 0x10000, 1, []int{10}},
		{1, 0x12000, 1, []int{12}},
		{1, 0x13000, 1, []int{-1}},
		{1, 0x20000, 1, []int{13}},
		// Over chunks and a zero page, and to the end before a gap.
		{1, 0x11000, 3, []int{11, 12, -1}},
		{1, 0x10000, 1000, []int{10, 11, 12, -1}},
		{1, 0x20000, 2, []int{13}},
		// Nothing is there: eager pages, gaps, other processes.
		{1, 0x8000, 1, nil},
		{1, 0xf000, 2, nil},
		{1, 0x14000, 1, nil},
		{1, 0x21000, 1, nil},
		{1, 1<<56 - pageindex.PageSize, 1, nil},
		{2, 0x10000, 1, nil},
	} {
		got, err := m.Await(t.Context(), c.pid, c.address, c.count)
		if got != len(c.want) || c.want == nil && !errdefs.IsNotFound(err) || c.want != nil && err != nil {
			t.Errorf("%d pages at %#x of %d: %d, %v", c.count, c.address, c.pid, got, err)
			continue
		}
		p := bytes.Repeat([]byte{0xff}, got*pageindex.PageSize)
		if err := m.Read(c.pid, c.address, p); err != nil {
			t.Errorf("%d pages at %#x: %v", got, c.address, err)
		}
		for i, content := range c.want {
			want := make([]byte, pageindex.PageSize)
			if content >= 0 {
				want = page(content)
			}
			if !bytes.Equal(p[i*pageindex.PageSize:][:pageindex.PageSize], want) {
				t.Errorf("page %d at %#x is wrong", i, c.address)
			}
		}
	}
	if err := m.Read(1, 0x13000, make([]byte, 2*pageindex.PageSize)); !errdefs.IsNotFound(err) {
		t.Errorf("over the end: %v", err)
	}
}

// TestMemoryWaits: a registry that refuses is asked again until it gives, or who
// asks goes away.
func TestMemoryWaits(t *testing.T) {
	n := newNode(t)
	var refuse atomic.Bool
	refused, serve := make(chan struct{}, 100), n.registry
	n.answer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !refuse.Load() {
			serve.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(http.StatusNotFound)
		refused <- struct{}{}
	}))
	s := newSample(t)
	n.push(s)
	m, err := n.memory(s)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	refuse.Store(true)

	ctx, cancel := context.WithCancel(t.Context())
	await := func(ctx context.Context) chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := m.Await(ctx, 1, 0x10000, 1)
			ended <- err
		}()
		return ended
	}
	impatient := await(ctx)
	<-refused
	cancel()
	if err := <-impatient; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	patient := await(t.Context())
	<-refused
	refuse.Store(false)
	if err := <-patient; err != nil {
		t.Error(err)
	}
}
