// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"thaw.dev/thaw/shim/readahead"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/pageindex"
)

const (
	// fetchPatience is how long a page may be missing because the daemon is
	// down before the container is killed: long enough for a service manager to
	// start it again.
	fetchPatience = 60 * time.Second
	fetchRetryMin = 50 * time.Millisecond
	fetchRetryMax = 2 * time.Second
)

// fetcher asks the daemon for chunks on behalf of one restore: those that the
// fault handler asks for, and those that a program seems to walk towards.
type fetcher struct {
	node  *node
	id    string
	index *pageindex.Index

	ahead sync.WaitGroup // requests for what nobody waits for yet

	mu      sync.Mutex
	predict []readahead.Predictor // by blob; guarded by mu
}

func newFetcher(n *node, id string, index *pageindex.Index) *fetcher {
	return &fetcher{node: n, id: id, index: index, predict: make([]readahead.Predictor, len(index.Blobs))}
}

// Fetch returns when the chunks are in the page store. It rides out a daemon
// that is restarted; what the daemon answers, unless it is about to stop, is final.
func (f *fetcher) Fetch(ctx context.Context, blob uint32, chunks []uint32, demand bool) error {
	if demand {
		f.readAhead(ctx, blob, chunks)
	}
	deadline := time.Now().Add(fetchPatience)
	for wait := fetchRetryMin; ; wait = min(2*wait, fetchRetryMax) {
		err := f.ask(ctx, blob, chunks, demand)
		if err == nil || !passing(err) || time.Now().After(deadline) {
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
	}
}

// passing reports whether an error only says that the daemon stops or has stopped.
func passing(err error) bool {
	var away awayError
	return errors.As(err, &away) || errdefs.IsAborted(err)
}

func (f *fetcher) ask(ctx context.Context, blob uint32, chunks []uint32, demand bool) error {
	return f.node.call(ctx, func(ctx context.Context, c api.NodeService) error {
		_, err := c.Fetch(ctx, &api.FetchRequest{RestoreId: f.id, Blob: blob, Chunks: chunks, Demand: demand})
		return err
	})
}

// readAhead asks for the chunks that will be missed after these, if that can be
// told, with the same urgency: a process is about to wait for them.
func (f *fetcher) readAhead(ctx context.Context, blob uint32, chunks []uint32) {
	var ahead []uint32
	f.mu.Lock()
	for _, c := range chunks {
		for _, next := range f.predict[blob].Miss(int(c), len(f.index.Blobs[blob].Chunks)) {
			ahead = append(ahead, uint32(next))
		}
	}
	f.mu.Unlock()
	if len(ahead) == 0 {
		return
	}
	f.ahead.Go(func() {
		// If it fails, the fault that needs the page asks again and has the error.
		if err := f.ask(ctx, blob, ahead, true); err != nil && ctx.Err() == nil {
			log.G(ctx).WithError(err).Debug("thaw: read ahead")
		}
	})
}

// wait returns when no request is under way any more. The contexts of all calls
// must be done.
func (f *fetcher) wait() { f.ahead.Wait() }
