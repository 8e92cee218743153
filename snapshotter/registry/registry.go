// SPDX-License-Identifier: Apache-2.0

// Package registry reads content by digest, whole or by byte range, from the
// registry that an image reference names, with the mirrors and credentials that
// the node's containerd uses.
//
// A fetch rides out what can be ridden out: it goes on where a connection broke,
// tries the next host, waits as a host asks to, renews tokens, and finds anew
// the storage that a registry redirected to. It ends when no progress was made
// for the client's timeout, or when every host has refused for good. Errors are
// of an errdefs class and name host, status and remedy in one line, never a URL.
//
// A Reader (fetch.go) asks hosts (hostset.go) in attempts (attempt.go), whose
// answers are checked (answer.go); an Error (error.go) is why one failed.
package registry

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// Options configure a Client.
type Options struct {
	// Hosts returns the hosts of a registry, mirrors first.
	Hosts docker.RegistryHosts
	// Timeout is how long a fetch of a range goes on trying without progress, which
	// is 64 KiB or what is left of the range.
	Timeout time.Duration
	// WholeTimeout is the same for whole blobs and manifests: someone waits for
	// an answer then, not a process for its memory. 0 means Timeout.
	WholeTimeout time.Duration
	// StallTimeout ends an attempt in which nothing arrives for so long.
	StallTimeout time.Duration
	// Backoff is the wait after all hosts failed once; it doubles up to 32-fold.
	// 0 means 100 ms.
	Backoff time.Duration
	// Observe, if set, is told of requests sent and bytes received.
	Observe func(requests, bytes int64)
}

// Client reads from registries. Its methods may be called at the same time.
type Client struct{ opts Options }

// New returns a client.
func New(opts Options) *Client {
	if opts.Backoff <= 0 {
		opts.Backoff = 100 * time.Millisecond
	}
	if opts.WholeTimeout <= 0 {
		opts.WholeTimeout = opts.Timeout
	}
	return &Client{opts: opts}
}

// Repository is where one image's content is read from. It keeps connections,
// tokens and redirects, so one Repository should serve all that an image needs.
// Its methods may be called at the same time.
type Repository struct {
	client *Client
	ref    reference.Spec
	name   string // the repository's path in the registry

	requests atomic.Int64
	bytes    atomic.Int64

	hosts atomic.Pointer[hostSet] // replaced under mu; nil only until Client.Repository returns

	mu sync.Mutex
	// redirects are where blobs were found, by digest, until that fails.
	redirects map[digest.Digest]redirect
}

// Stats count what a Repository has asked of the network.
type Stats struct {
	// Requests is the number of HTTP requests.
	Requests int64
	// Bytes is how much of response bodies was received.
	Bytes int64
}

// Repository returns the repository that an image reference names.
func (c *Client) Repository(ref string) (*Repository, error) {
	spec, err := reference.Parse(ref)
	if err != nil {
		return nil, fmt.Errorf("image reference %.200q: %w: %w", ref, err, errdefs.ErrInvalidArgument)
	}
	r := &Repository{client: c, ref: spec, redirects: make(map[digest.Digest]redirect)}
	r.name = spec.Locator[len(spec.Hostname()):]
	if r.name == "" || r.name == "/" {
		return nil, fmt.Errorf("image reference %.200q names no repository: %w", ref, errdefs.ErrInvalidArgument)
	}
	if _, err := r.pullHosts(); err != nil {
		return nil, err
	}
	return r, nil
}

// Close drops the repository's idle connections.
func (r *Repository) Close() {
	if set := r.hosts.Load(); set != nil {
		set.closeIdle()
	}
}

// Stats returns the counters. They only grow.
func (r *Repository) Stats() Stats {
	return Stats{Requests: r.requests.Load(), Bytes: r.bytes.Load()}
}

func (r *Repository) count(requests, bytes int64) {
	r.requests.Add(requests)
	r.bytes.Add(bytes)
	if f := r.client.opts.Observe; f != nil {
		f(requests, bytes)
	}
}

// Manifest returns a manifest or index. Its digest was verified.
func (r *Repository) Manifest(ctx context.Context, desc v1.Descriptor, limit int64) ([]byte, error) {
	return r.whole(ctx, "manifests", desc, limit)
}

// Blob returns a small blob. Its digest was verified.
func (r *Repository) Blob(ctx context.Context, desc v1.Descriptor, limit int64) ([]byte, error) {
	return r.whole(ctx, "blobs", desc, limit)
}

func (r *Repository) whole(ctx context.Context, kind string, desc v1.Descriptor, limit int64) ([]byte, error) {
	if desc.Size < 0 || desc.Size > limit {
		return nil, fmt.Errorf("%s is %d bytes large, allowed are %d: %w", desc.Digest, desc.Size, limit, errdefs.ErrResourceExhausted)
	}
	var buf bytes.Buffer
	buf.Grow(int(desc.Size))
	if err := r.copy(ctx, kind, desc, &buf, buf.Reset); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// File is what CopyBlob writes to.
type File interface {
	io.Writer
	io.Seeker
	Truncate(size int64) error
}

// CopyBlob writes a blob of any size to a file, from its beginning. What is in
// the file must not be used before CopyBlob has returned without error: only
// then has the digest been verified.
func (r *Repository) CopyBlob(ctx context.Context, desc v1.Descriptor, f File) error {
	var ferr error
	err := r.copy(ctx, "blobs", desc, f, func() {
		if _, ferr = f.Seek(0, io.SeekStart); ferr == nil {
			ferr = f.Truncate(0)
		}
	})
	if err == nil && ferr != nil {
		return ferr
	}
	return err
}

// copy fetches and verifies; content with a wrong digest is fetched once more,
// from another host if there is one, after reset was called.
func (r *Repository) copy(ctx context.Context, kind string, desc v1.Descriptor, w io.Writer, reset func()) error {
	var avoid string
	for try := 0; ; try++ {
		verifier := desc.Digest.Verifier()
		rd, err := r.open(ctx, kind, Range{Digest: desc.Digest, Size: desc.Size, Length: desc.Size, Avoid: avoid}, r.client.opts.WholeTimeout)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.MultiWriter(w, verifier), rd)
		rd.Close()
		if err != nil {
			return err
		}
		if verifier.Verified() {
			return nil
		}
		avoid = rd.Host()
		if try > 0 {
			return failure(describe(kind, desc.Digest), []*Error{damaged(avoid)})
		}
		reset()
	}
}

func damaged(host string) *Error {
	e := wrong(host, "the content does not have the digest that it should have")
	e.Remedy = "push the checkpoint image again: the registry's copy is damaged"
	return e
}

// Range names a part of a blob.
type Range struct {
	Digest digest.Digest
	// Size is the whole blob's, in bytes.
	Size int64
	// Offset and Length are the part's place in the blob, in bytes.
	Offset, Length int64
	// Avoid is a host whose content was found damaged: it is asked last.
	Avoid string
}

// Open returns a reader of exactly the range's bytes, which are not verified.
// The reader goes on by itself where a connection broke; its errors are final.
// Close it.
func (r *Repository) Open(ctx context.Context, rg Range) (*Reader, error) {
	if rg.Length <= 0 || rg.Offset < 0 || rg.Offset > rg.Size-rg.Length {
		return nil, fmt.Errorf("range %d+%d of %d bytes: %w", rg.Offset, rg.Length, rg.Size, errdefs.ErrInvalidArgument)
	}
	return r.open(ctx, "blobs", rg, r.client.opts.Timeout)
}

func describe(kind string, d digest.Digest) string {
	name := d.String()
	if len(name) > 19 {
		name = name[:19]
	}
	if kind == "manifests" {
		return "manifest " + name
	}
	return "blob " + name
}

var _ io.ReadCloser = (*Reader)(nil)
