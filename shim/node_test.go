// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/api"
)

// daemon answers Fetch with what answer returns; the other calls are not made here.
type daemon struct {
	api.NodeService
	answer func(*api.FetchRequest) error
}

func (d daemon) Fetch(_ context.Context, r *api.FetchRequest) (*api.FetchResponse, error) {
	return &api.FetchResponse{}, api.ToStatus(d.answer(r))
}

// serve runs a stand-in for the daemon until stop is called.
func serve(t *testing.T, path string, answer func(*api.FetchRequest) error) (stop func()) {
	t.Helper()
	s, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterNodeService(s, daemon{answer: answer})
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Serve(t.Context(), l); !errors.Is(err, ttrpc.ErrServerClosed) {
			t.Error(err)
		}
	}()
	return func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		<-done
	}
}

func newTestFetcher(t *testing.T, path string) *fetcher {
	t.Helper()
	n := newNode(path)
	t.Cleanup(n.close)
	return &fetcher{n, "ns/c"}
}

// TestFetchRidesOutARestart: the daemon stops, is away, and comes back.
func TestFetchRidesOutARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "thaw.sock")
	f := newTestFetcher(t, path)
	stopping := make(chan struct{}, 1)
	stop := serve(t, path, func(*api.FetchRequest) error {
		select {
		case stopping <- struct{}{}:
		default:
		}
		return fmt.Errorf("stopping: %w", errdefs.ErrAborted)
	})
	fetched := make(chan error, 1)
	go func() { fetched <- f.Fetch(t.Context(), 0, []uint32{7}, pager.Demand) }()
	<-stopping
	stop()
	var asked atomic.Uint32
	defer serve(t, path, func(r *api.FetchRequest) error {
		asked.Store(r.GetChunks()[0])
		return nil
	})()
	if err := <-fetched; err != nil || asked.Load() != 7 {
		t.Errorf("chunk %d, %v", asked.Load(), err)
	}
}

// TestFetchErrorIsFinal: what the daemon says of a registry is not to be waited for again.
func TestFetchErrorIsFinal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "thaw.sock")
	f := newTestFetcher(t, path)
	var calls atomic.Int32
	defer serve(t, path, func(*api.FetchRequest) error {
		calls.Add(1)
		return fmt.Errorf("registry is down: %w", errdefs.ErrUnavailable)
	})()
	if err := f.Fetch(t.Context(), 0, []uint32{7}, pager.Demand); err == nil || !errdefs.IsUnavailable(err) || calls.Load() != 1 {
		t.Errorf("%d calls, %v", calls.Load(), err)
	}
}

func TestFetchEndsWithItsContext(t *testing.T) {
	f := newTestFetcher(t, filepath.Join(t.TempDir(), "nobody.sock"))
	ctx, cancel := context.WithCancel(t.Context())
	fetched := make(chan error, 1)
	go func() { fetched <- f.Fetch(ctx, 0, []uint32{7}, pager.Demand) }()
	cancel()
	if err := <-fetched; err == nil {
		t.Error("fetched from nobody")
	}
}
