// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/stream"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/registry"
)

// uploader puts blobs and manifests into one repository.
type uploader struct {
	repo  name.Repository
	push  *remote.Pusher
	pull  []remote.Option // for reading from other repositories
	meter *meter
}

func newUploader(ctx context.Context, repo name.Repository, certsDir string, m *meter) (*uploader, error) {
	keys := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	push, err := remote.NewPusher(keys, remote.WithContext(ctx), remote.WithTransport(registry.NewPushTransport(ctx, certsDir)),
		// Whole uploads are tried again by attempt, which can make their
		// content anew.
		remote.WithRetryPredicate(func(error) bool { return false }))
	if err != nil {
		return nil, err
	}
	pull := []remote.Option{keys, remote.WithContext(ctx), remote.WithTransport(registry.NewPullTransport(ctx, certsDir))}
	return &uploader{repo: repo, push: push, pull: pull, meter: m}, nil
}

const (
	attempts   = 3
	retryPause = time.Second // before the second attempt, doubled before the third
)

// attempt runs fn again when the registry or the way there failed for what
// looks like a moment.
func attempt(ctx context.Context, fn func() error) error {
	pause := retryPause
	for i := 1; ; i++ {
		err := fn()
		if err == nil || i == attempts || !temporary(err) || ctx.Err() != nil {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return err
		case <-t.C:
		}
		pause *= 2
	}
}

func temporary(err error) bool {
	var te *transport.Error
	if errors.As(err, &te) {
		return te.Temporary()
	}
	var ne net.Error
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.As(err, &ne) && ne.Timeout()
}

// open starts the upload of a blob whose digest and size are not known yet.
func (u *uploader) open(ctx context.Context, mediaType string) *sink {
	pr, pw := io.Pipe()
	s := &sink{u: u, pipe: pw, layer: &streamLayer{body: pr, mediaType: types.MediaType(mediaType)}, done: make(chan error, 1)}
	go func() { // ends when the pipe does: Commit or Abort
		err := u.push.Upload(ctx, u.repo, s.layer)
		// If the registry ended the upload before its end, writers must not wait.
		cause := err
		if cause == nil {
			cause = io.ErrClosedPipe
		}
		pr.CloseWithError(cause)
		s.done <- err
	}()
	return s
}

// sink is a blob on its way; it implements pageblob.Sink.
type sink struct {
	u     *uploader
	pipe  *io.PipeWriter
	layer *streamLayer
	sent  int
	done  chan error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.pipe.Write(p)
	s.sent += n
	s.u.meter.uploaded(n)
	return n, err
}

func (s *sink) Commit(d digest.Digest, size int64) error {
	s.layer.digest, s.layer.size = ggcr.Hash{Algorithm: d.Algorithm().String(), Hex: d.Encoded()}, size
	s.pipe.Close() // publishes digest and size to the uploading goroutine
	err := <-s.done
	if err != nil {
		s.u.meter.uploaded(-s.sent)
	}
	return err
}

func (s *sink) Abort(cause error) {
	if cause == nil {
		cause = context.Canceled
	}
	s.pipe.CloseWithError(cause)
	<-s.done
	s.u.meter.uploaded(-s.sent)
}

// streamLayer is a layer that is read once and knows its digest behind its end.
type streamLayer struct {
	mediaType types.MediaType
	body      *io.PipeReader
	opened    bool
	ended     atomic.Bool // the reader saw the end: digest and size are set

	digest ggcr.Hash
	size   int64
}

func (l *streamLayer) Digest() (ggcr.Hash, error) {
	if !l.ended.Load() {
		return ggcr.Hash{}, stream.ErrNotComputed
	}
	return l.digest, nil
}

func (l *streamLayer) DiffID() (ggcr.Hash, error) { return ggcr.Hash{}, stream.ErrNotComputed }

func (l *streamLayer) Size() (int64, error) {
	if !l.ended.Load() {
		return 0, stream.ErrNotComputed
	}
	return l.size, nil
}

func (l *streamLayer) MediaType() (types.MediaType, error) { return l.mediaType, nil }

func (l *streamLayer) Uncompressed() (io.ReadCloser, error) {
	return nil, errors.New("layer is streamed")
}

// Compressed returns the stream. A registry that wants it a second time, by a
// redirect in the middle of an upload, cannot have it.
func (l *streamLayer) Compressed() (io.ReadCloser, error) {
	if l.opened {
		return nil, errors.New("the registry asked for streamed content a second time")
	}
	l.opened = true
	return &streamBody{l}, nil
}

type streamBody struct{ l *streamLayer }

func (b *streamBody) Read(p []byte) (int, error) {
	n, err := b.l.body.Read(p)
	if err == io.EOF {
		b.l.ended.Store(true)
	}
	return n, err
}

func (b *streamBody) Close() error { return b.l.body.Close() }

// stream uploads what write writes.
func (u *uploader) stream(ctx context.Context, mediaType string, write func(io.Writer) error) (v1.Descriptor, error) {
	var desc v1.Descriptor
	err := attempt(ctx, func() error {
		s := u.open(ctx, mediaType)
		sum := digest.SHA256.Digester()
		count := &counter{w: io.MultiWriter(s, sum.Hash())}
		if err := write(count); err != nil {
			s.Abort(err)
			return err
		}
		desc = v1.Descriptor{MediaType: mediaType, Digest: sum.Digest(), Size: count.n}
		return s.Commit(desc.Digest, desc.Size)
	})
	return desc, err
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// bytes uploads content that is in memory.
func (u *uploader) bytes(ctx context.Context, mediaType string, p []byte) (v1.Descriptor, error) {
	err := attempt(ctx, func() error {
		return u.push.Upload(ctx, u.repo, static.NewLayer(p, types.MediaType(mediaType)))
	})
	if err != nil {
		return v1.Descriptor{}, err
	}
	u.meter.uploaded(len(p))
	return v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(p), Size: int64(len(p))}, nil
}

// manifest uploads a manifest or index under a reference.
func (u *uploader) manifest(ctx context.Context, ref name.Reference, mediaType string, p []byte) error {
	return attempt(ctx, func() error { return u.push.Put(ctx, ref, &rawManifest{p, types.MediaType(mediaType)}) })
}

type rawManifest struct {
	content   []byte
	mediaType types.MediaType
}

func (m *rawManifest) RawManifest() ([]byte, error)        { return m.content, nil }
func (m *rawManifest) MediaType() (types.MediaType, error) { return m.mediaType, nil }

// ensure makes the repository have a blob that exists elsewhere: it is there
// already, or is mounted from another repository of the same registry, or, if
// neither works, is uploaded from where it can be read.
func (u *uploader) ensure(ctx context.Context, l BaseLayer) error {
	h, err := ggcr.NewHash(l.Descriptor.Digest.String())
	if err != nil {
		return err
	}
	layer := &knownLayer{ctx: ctx, u: u, hash: h, BaseLayer: l}
	var out ggcr.Layer = layer
	if from, ok := u.mountable(l); ok {
		out = &remote.MountableLayer{Layer: layer, Reference: from}
	}
	if err := attempt(ctx, func() error { return u.push.Upload(ctx, u.repo, out) }); err != nil {
		return fmt.Errorf("base layer %s: %w", l.Descriptor.Digest, err)
	}
	return nil
}

// mountable finds a repository of the target's registry that has the layer.
func (u *uploader) mountable(l BaseLayer) (name.Reference, bool) {
	for _, r := range l.Repositories {
		repo, err := name.NewRepository(r)
		if err != nil {
			continue
		}
		// containerd records where content came from without the port. Whether
		// a registry at another port of that host has it is for it to say.
		if registry := repo.RegistryStr(); registry != u.repo.RegistryStr() && registry != hostname(u.repo.RegistryStr()) {
			continue
		}
		if repo = u.repo.Registry.Repo(repo.RepositoryStr()); repo.Name() == u.repo.Name() {
			continue
		}
		ref := repo.Digest(l.Descriptor.Digest.String())
		if has(ref, u.pull) {
			return ref, true
		}
	}
	return nil, false
}

// hostname is a registry's name without its port.
func hostname(registry string) string {
	if h, _, err := net.SplitHostPort(registry); err == nil {
		return h
	}
	return registry
}

// has reports whether a repository has a blob.
func has(ref name.Digest, opts []remote.Option) bool {
	l, err := remote.Layer(ref, opts...)
	if err != nil {
		return false
	}
	ok, err := partial.Exists(l)
	return err == nil && ok
}

// knownLayer is a blob whose digest is known. Its content is read only when the
// registry has to be sent it.
type knownLayer struct {
	ctx  context.Context
	u    *uploader
	hash ggcr.Hash
	BaseLayer
}

func (l *knownLayer) Digest() (ggcr.Hash, error)           { return l.hash, nil }
func (l *knownLayer) DiffID() (ggcr.Hash, error)           { return ggcr.Hash{}, stream.ErrNotComputed }
func (l *knownLayer) Size() (int64, error)                 { return l.Descriptor.Size, nil }
func (l *knownLayer) MediaType() (types.MediaType, error)  { return types.OCILayer, nil }
func (l *knownLayer) Uncompressed() (io.ReadCloser, error) { return nil, errors.New("not needed") }

func (l *knownLayer) Compressed() (io.ReadCloser, error) {
	var errs []error
	if l.Open != nil {
		rc, err := l.Open(l.ctx)
		if err == nil {
			return &meteredBody{rc, l.u.meter}, nil
		}
		errs = append(errs, err)
	}
	for _, r := range l.Repositories {
		repo, err := name.NewRepository(r)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		rl, err := remote.Layer(repo.Digest(l.hash.String()), l.u.pull...)
		if err == nil {
			var rc io.ReadCloser
			if rc, err = rl.Compressed(); err == nil {
				return &meteredBody{rc, l.u.meter}, nil
			}
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		errs = append(errs, errors.New("no repository is known to have it"))
	}
	return nil, fmt.Errorf("it is neither in the target repository nor on this node nor where the image came from (%w): push the base image to the target's registry first", errors.Join(errs...))
}

type meteredBody struct {
	io.ReadCloser
	m *meter
}

func (b *meteredBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.m.uploaded(n)
	return n, err
}
