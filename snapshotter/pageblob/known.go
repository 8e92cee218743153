// SPDX-License-Identifier: Apache-2.0

package pageblob

import (
	"crypto/sha256"
	"errors"
	"io"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// Known are the chunks of earlier checkpoints, which a Writer refers to rather
// than writing them again. The zero value knows none. It must not be changed
// while a Writer uses it.
type Known struct {
	blobs  []pageindex.Blob
	seen   map[digest.Digest]struct{}
	chunks map[[sha256.Size]byte]place
}

// Add makes the chunks of a blob known. A blob that is known already is left out.
func (k *Known) Add(b pageindex.Blob) {
	if _, ok := k.seen[b.Digest]; ok {
		return
	}
	if k.seen == nil {
		k.seen = make(map[digest.Digest]struct{})
		k.chunks = make(map[[sha256.Size]byte]place)
	}
	k.seen[b.Digest] = struct{}{}
	n := len(k.blobs)
	k.blobs = append(k.blobs, b)
	for i, c := range b.Chunks {
		if _, ok := k.chunks[c.SHA256]; !ok {
			k.chunks[c.SHA256] = place{blob: n, old: true, page: b.FirstPage(i), pages: c.Pages}
		}
	}
}

// place is where a chunk's pages are.
type place struct {
	blob  int  // index into the Writer's own blobs, or into Known.blobs
	old   bool // the latter
	page  uint64
	pages uint32
}

// Sink takes one page blob.
type Sink interface {
	io.Writer
	// Commit is called once, behind the last Write, with what the blob turned
	// out to be. It returns when the blob is stored.
	Commit(d digest.Digest, size int64) error
	// Abort is called in place of Commit when there will be no whole blob.
	Abort(cause error)
}

// ErrClosed means that a Writer was used after Close or Abort.
var ErrClosed = errors.New("page blob writer is closed")
