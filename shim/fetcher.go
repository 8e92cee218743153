// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/api"
)

const (
	// fetchPatience is how long a page may be missing because the daemon is
	// down before the container is killed: long enough for a service manager to
	// start it again.
	fetchPatience = 60 * time.Second
	fetchRetryMin = 50 * time.Millisecond
	fetchRetryMax = 2 * time.Second
)

// fetcher asks the daemon for chunks on behalf of one restore.
type fetcher struct {
	node *node
	id   string
}

var urgencies = [...]api.Urgency{
	pager.Background: api.Urgency_BACKGROUND, pager.Ahead: api.Urgency_AHEAD, pager.Demand: api.Urgency_DEMAND,
}

// Fetch returns when the chunks are in the page store. It rides out a daemon
// that is restarted; what the daemon answers, unless it is about to stop, is final.
func (f *fetcher) Fetch(ctx context.Context, blob uint32, chunks []uint32, u pager.Urgency) error {
	deadline := time.Now().Add(fetchPatience)
	for wait := fetchRetryMin; ; wait = min(2*wait, fetchRetryMax) {
		err := f.ask(ctx, blob, chunks, u)
		if err == nil || u == pager.Ahead || !passing(err) || time.Now().After(deadline) {
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

func (f *fetcher) ask(ctx context.Context, blob uint32, chunks []uint32, u pager.Urgency) error {
	return f.node.call(ctx, func(ctx context.Context, c api.NodeService) error {
		_, err := c.Fetch(ctx, &api.FetchRequest{RestoreId: f.id, Blob: blob, Chunks: chunks, Urgency: urgencies[u]})
		return err
	})
}
