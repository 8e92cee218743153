// SPDX-License-Identifier: Apache-2.0

// Package restore decides whether a container is to be restored and makes ready
// what CRIU and the fault handler need for it: the checkpoint is found through
// the node's image store, fetched, verified, checked against this machine and
// the container's spec, and laid out; its page blobs are opened in the page store.
//
// The life of a restore: Prepare makes it and starts to prefetch its working set;
// Admit checks it again where its root filesystem is;
// Fetch brings pages; Report tells how it is going, and unless the policy is `lazy`
// starts the background fill once the container runs; Record keeps what it touched
// first, for the next restore; Release ends it. Restores outlive the daemon: each has a record
// in the state folder, from which the next run goes on.
package restore

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/tracing"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/policy"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/seal/wrap"
	"thaw.dev/thaw/snapshotter/workingset"
)

// States that a shim reports (api.Status).
const (
	StatePreparing = "preparing"
	StateRestoring = "restoring"
	StateLazy      = "lazy" // the processes run, pages are missing
	StateComplete  = "complete"
	StateFailed    = "failed"
)

// Options configure a Manager.
type Options struct {
	// StateDir is on a tmpfs; CacheDir is on a disk.
	StateDir, CacheDir string
	Images             Images
	Registry           *registry.Client
	Pages              *pagestore.Store
	Limits             Limits
	MetadataCacheSize  int64 // bytes
	Policy             string
	// FillDelay is how long after a container runs its blobs are filled.
	FillDelay time.Duration
	// Trust decides which images may be restored.
	Trust *policy.Policy
	// Keys open encrypted checkpoints; nil: there are none.
	Keys *wrap.Keys
	// CheckCRIU returns nil if the node's CRIU can restore lazily.
	CheckCRIU func(context.Context) error
	// Admit returns nil if the images in a folder may be restored as a container
	// with that spec, in a root filesystem that is mounted at a path, or "" as long
	// as none is. The filter is what the node's runtime makes of the spec's seccomp
	// section, nil as long as it is not known.
	Admit func(ctx context.Context, images, rootfs string, filter []byte, spec *specs.Spec) error
}

// Manager has all restores of the node. Its methods may be called at the same
// time.
type Manager struct {
	opts    Options
	layouts *layouts
	sets    *workingset.Store
	ctx     context.Context // of prefetches and background fills
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	sweeper sync.WaitGroup

	mu       sync.Mutex // records of restores are written and removed under it
	restores map[string]*restored
	repos    map[string]*repository
	lookups  map[string]*lookup
	indexes  map[digest.Digest]v1.Descriptor // checkpoints by the indexes they are in
	closed   bool
}

// Open returns a manager that goes on with the restores of an earlier run.
// Close it.
func Open(ctx context.Context, opts Options) (*Manager, error) {
	meta, err := openMetadata(filepath.Join(opts.CacheDir, "metadata"), opts.MetadataCacheSize)
	if err != nil {
		return nil, err
	}
	meta.pages = opts.Pages
	sets, err := workingset.Open(filepath.Join(opts.CacheDir, "workingsets"))
	if err != nil {
		return nil, err
	}
	m := &Manager{opts: opts, sets: sets, restores: make(map[string]*restored), repos: make(map[string]*repository), lookups: make(map[string]*lookup), indexes: make(map[digest.Digest]v1.Descriptor)}
	if opts.Keys == nil {
		opts.Keys = &wrap.Keys{}
	}
	if m.layouts, err = openLayouts(filepath.Join(opts.StateDir, "images"), opts.Limits, meta, opts.Keys); err != nil {
		return nil, err
	}
	m.layouts.tune = true
	m.ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := m.recover(ctx); err != nil {
		m.cancel()
		return nil, err
	}
	if err := m.layouts.prune(); err != nil {
		m.cancel()
		return nil, err
	}
	if opts.Pages != nil {
		opts.Pages.ForgetSealed() // of those whose layouts are no more
	}
	m.sweeper.Go(m.sweepAgain)
	return m, nil
}

// Close ends prefetches and background fills, and lets go of the page store. The restores'
// records stay for the next run; those that somebody has removed are written again.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	all := m.restores
	m.restores = nil
	m.mu.Unlock()
	m.cancel()
	m.sweeper.Wait()
	m.wg.Wait()
	for _, r := range all {
		if err := r.record.keep(m.RecordDir()); err != nil {
			log.L.WithError(err).Error("a restore cannot go on after a restart")
		}
		m.letGo(r)
	}
}

// Prepare decides about a container; see api.Node.
func (m *Manager) Prepare(ctx context.Context, req *api.PrepareRequest) (*api.PrepareResponse, error) {
	if req.GetNamespace() == "" || req.GetContainerId() == "" || !filepath.IsAbs(req.GetBundle()) {
		return nil, fmt.Errorf("namespace, container ID or absolute bundle path is missing: %w", errdefs.ErrInvalidArgument)
	}
	spec, err := readSpec(req.GetBundle())
	if err != nil {
		return nil, err
	}
	w, err := wishOf(spec, m.opts.Policy)
	if err != nil {
		return nil, err
	}
	if w.sandbox {
		return &api.PrepareResponse{}, nil
	}
	var able errgroup.Group
	able.Go(func() error { return m.checkCRIU(ctx) }) // which it must be only if there is something to restore
	manifest, err := m.resolve(ctx, req, &w)
	unable := able.Wait()
	if errors.Is(err, checkpoint.ErrNoCheckpoint) && !w.required {
		log.G(ctx).WithError(err).Debug("no restore")
		return &api.PrepareResponse{Image: w.image}, nil
	}
	if err != nil {
		return nil, err
	}
	var r *restored
	if err = unable; err == nil {
		r, err = m.prepareVerified(ctx, req, spec, &w, manifest)
	}
	if err != nil {
		return nil, fmt.Errorf("restore of %s: %w", w.image, classed(err))
	}
	return r.response(), nil
}

// classed gives errors of the image's format a class that travels over RPC.
func classed(err error) error {
	if errors.Is(err, checkpoint.ErrFormat) || errors.Is(err, pageindex.ErrFormat) || errors.Is(err, image.ErrFormat) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return err
}

// resolve finds the checkpoint of the image that a container runs, by what the
// node's image store says the image is.
func (m *Manager) resolve(ctx context.Context, req *api.PrepareRequest, w *wish) (v1.Descriptor, error) {
	ctx, span := startSpan(ctx, "Resolve")
	defer span.End()
	none := func(format string, args ...any) (v1.Descriptor, error) {
		why := fmt.Sprintf(format, args...)
		if w.required {
			return v1.Descriptor{}, fmt.Errorf("%s, but the annotation %s requires a restore (name a checkpoint image, as thaw checkpoint --push makes it, or remove the annotation): %w: %w",
				why, AnnotationRestore, checkpoint.ErrNoCheckpoint, errdefs.ErrFailedPrecondition)
		}
		return v1.Descriptor{}, fmt.Errorf("%s: %w", why, checkpoint.ErrNoCheckpoint)
	}
	if w.image == "" {
		name, err := m.opts.Images.ContainerImage(ctx, req.GetNamespace(), req.GetContainerId())
		if err != nil && !errdefs.IsNotFound(err) {
			return v1.Descriptor{}, err
		}
		if name == "" {
			return none("the container was made from no image")
		}
		w.image = name
	}
	target, err := m.opts.Images.Target(ctx, req.GetNamespace(), w.image)
	if errdefs.IsNotFound(err) {
		return none("image %s is not in containerd's image store", w.image)
	}
	if err != nil {
		return v1.Descriptor{}, err
	}
	w.target = target
	desc, err := m.find(ctx, req.GetNamespace(), w.image, target, none)
	if err == nil {
		err = m.opts.Trust.Admits(w.image, target.Digest)
	}
	return desc, err
}

// prepare makes a restore that is known once verdict returns nil. Everything that it
// takes is given back on error.
func (m *Manager) prepare(ctx context.Context, req *api.PrepareRequest, spec *specs.Spec, w *wish, manifest v1.Descriptor, verdict func() error) (_ *restored, err error) {
	if err := checkPIDNamespace(spec); err != nil {
		return nil, err
	}
	r := &restored{ready: make(chan struct{}), expects: &expectation{done: make(chan struct{})}, record: record{
		ID: ID(req.GetNamespace(), req.GetContainerId()), Namespace: req.GetNamespace(), Container: req.GetContainerId(),
		Bundle: req.GetBundle(), Image: w.image, Manifest: manifest.Digest.String(), Size: manifest.Size, Policy: w.policy, Pod: w.pod, Started: time.Now(),
	}}
	if r.repo, err = m.repository(w.image); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.letGo(r)
		}
	}()
	r.ctx, r.cancel = context.WithCancel(m.ctx)
	span := trace.SpanFromContext(ctx)
	if w.record {
		r.expects = nil
	} else if err := m.background(func() { m.prefetch(trace.ContextWithSpan(r.ctx, span), r, w.target.Digest) }); err != nil {
		return nil, err
	}
	if r.layout, err = m.layouts.acquire(ctx, r.repo.Repository, manifest); err != nil {
		return nil, err
	}
	m.layouts.note(r.layout, req.GetNamespace(), w.image)
	if err := m.admit(ctx, r, "", nil, spec); err != nil {
		return nil, err
	}
	if err := verdict(); err != nil {
		return nil, err
	}
	if err := m.take(r); err != nil {
		return nil, err
	}
	if err := m.add(r); err != nil {
		return nil, err
	}
	close(r.ready)
	return r, nil
}

// Admit checks a prepared restore once more, in the container's root filesystem;
// see api.Node.
func (m *Manager) Admit(ctx context.Context, id, rootfs string, filter []byte) error {
	if !filepath.IsAbs(rootfs) {
		return fmt.Errorf("absolute path of the root filesystem is missing: %w", errdefs.ErrInvalidArgument)
	}
	r, err := m.get(id)
	if err != nil {
		return err
	}
	spec, err := readSpec(r.record.Bundle)
	if err == nil {
		err = m.admit(ctx, r, rootfs, filter, spec)
	}
	if err != nil {
		return fmt.Errorf("restore of %s: %w", r.record.Image, classed(err))
	}
	return nil
}

func (m *Manager) admit(ctx context.Context, r *restored, rootfs string, filter []byte, spec *specs.Spec) error {
	if m.opts.Admit == nil {
		return nil
	}
	ctx, span := startSpan(ctx, "Admit")
	defer span.End()
	return m.opts.Admit(ctx, r.layout.images(), rootfs, filter, spec)
}

func (m *Manager) checkCRIU(ctx context.Context) error {
	if m.opts.CheckCRIU == nil {
		return nil
	}
	ctx, span := startSpan(ctx, "CheckCRIU")
	defer span.End()
	return m.opts.CheckCRIU(ctx)
}

// startSpan starts a span of a restore.
func startSpan(ctx context.Context, name string, opts ...tracing.SpanOpt) (context.Context, *tracing.Span) {
	return tracing.StartSpan(ctx, tracing.Name("thaw.restore", name), opts...)
}

// background runs a function that ends when a restore's or the manager's context
// does.
func (m *Manager) background(f func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosed
	}
	m.wg.Go(f)
	return nil
}

// ID names the restore of a container, of which there is at most one.
func ID(namespace, container string) string { return namespace + "/" + container }
