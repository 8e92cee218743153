// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"fmt"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// ReadPages reads whole pages of the blob's uncompressed content into p, from a
// page on. Their chunks must be there: see Fetch.
func (b *Blob) ReadPages(page uint64, p []byte) error {
	n := uint64(len(p)) / pageindex.PageSize
	if n == 0 || uint64(len(p))%pageindex.PageSize != 0 || page >= b.index.Pages() || n > b.index.Pages()-page {
		return fmt.Errorf("%d bytes from page %d of %d: %w", len(p), page, b.index.Pages(), errdefs.ErrInvalidArgument)
	}
	for c := b.index.ChunkOf(page); c < len(b.index.Chunks) && b.index.FirstPage(c) < page+n; c++ {
		if !b.Present(c) {
			return fmt.Errorf("chunk %d of %s is not in the page store: %w", c, b.index.Digest, errdefs.ErrFailedPrecondition)
		}
	}
	if _, err := b.data.ReadAt(p, int64(page)*pageindex.PageSize); err != nil {
		return fmt.Errorf("page store: %w", err)
	}
	// After the read: what it says holds for what was read.
	if err := b.sound(); err != nil {
		return fmt.Errorf("page store: %w: %w", err, errdefs.ErrDataLoss)
	}
	return nil
}
