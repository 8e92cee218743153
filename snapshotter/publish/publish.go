// SPDX-License-Identifier: Apache-2.0

// Package publish turns a dumped container into a checkpoint image in a
// registry. docs/image-format.md specifies the image.
//
// Where the dump comes from is a Source: package publish/dump makes one of a
// running container, package publish/archive one of the archives that the
// kubelet writes. Nothing is copied to disk on the way: memory is compressed on
// all cores while it is uploaded.
package publish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

// Target says where a checkpoint image goes.
type Target struct {
	// Reference is the image's name with a tag.
	Reference string
	// CertsDir is containerd's registry configuration folder.
	CertsDir string
	// Reuse are references of checkpoint images whose chunks of memory need
	// not be uploaded again. An earlier checkpoint under Reference itself, and
	// the one that the container was restored from, are used without being
	// named here.
	Reuse []string
	// Envelope has the key with which state, page index and pages are encrypted; nil:
	// they are not. An encrypted checkpoint has chunks with no other in common: Reuse must
	// be empty.
	Envelope *wrap.Envelope
	// Progress is called often, from one goroutine at a time. It may be nil.
	Progress func(Progress)
}

// Result is what was published.
type Result struct {
	// Reference is the image's name with its digest.
	Reference string
	Digest    digest.Digest // of the index
	Config    *checkpoint.Config
	// Uploaded is how many bytes were sent.
	Uploaded int64
	// Plain is the size of an encrypted checkpoint's layer with what the container
	// wrote to its root filesystem, which is not encrypted. 0: there is none.
	Plain int64
}

// Publish makes a checkpoint image of a dump and uploads it. Errors are one
// line with cause and remedy. A failure leaves no tag; blobs that were uploaded
// by then are the registry's to collect.
func Publish(ctx context.Context, src *Source, to Target) (*Result, error) {
	ref, err := ParseTarget(to.Reference)
	if err != nil {
		return nil, err
	}
	maps, err := src.Images.Pagemaps()
	if err != nil {
		return nil, err
	}
	for _, m := range maps {
		if err := m.Complete(); err != nil {
			return nil, err
		}
	}
	tasks, err := src.Images.Tasks()
	if err != nil {
		return nil, err
	}
	changed := image.MakeEager(tasks, maps)
	config, err := describe(src, maps)
	if err != nil {
		return nil, err
	}
	files, err := stateFiles(src.Images, maps, changed, src.Spec)
	if err != nil {
		return nil, err
	}
	m := &meter{report: to.Progress}
	m.update(func(p *Progress) { p.MemoryTotal = config.Memory.Lazy })
	u, err := newUploader(ctx, ref.Context(), to.CertsDir, m)
	if err != nil {
		return nil, err
	}
	r, err := u.publish(ctx, ref, src, to, maps, files, config)
	if err != nil {
		return nil, explain("push", ref, err)
	}
	return r, nil
}

// CheckTarget returns nil if the registry can be reached and takes pushes to the
// reference.
func CheckTarget(ctx context.Context, reference, certsDir string) error {
	ref, err := ParseTarget(reference)
	if err != nil {
		return err
	}
	if err := remote.CheckPushPermission(ref, authn.DefaultKeychain, withContext{ctx, registry.NewPushTransport(ctx, certsDir)}); err != nil {
		return explain("push", ref, err)
	}
	return nil
}

// withContext gives a context to requests that are made without one.
type withContext struct {
	ctx context.Context
	rt  http.RoundTripper
}

func (w withContext) RoundTrip(r *http.Request) (*http.Response, error) {
	return w.rt.RoundTrip(r.WithContext(w.ctx))
}

// ParseTarget checks a reference that an image is to be pushed to.
func ParseTarget(s string) (name.Tag, error) {
	ref, err := name.ParseReference(s, name.WithDefaultTag("latest"))
	if err != nil {
		return name.Tag{}, fmt.Errorf("%q is no image reference: use HOST/REPOSITORY:TAG", s)
	}
	tag, ok := ref.(name.Tag)
	if !ok {
		return name.Tag{}, fmt.Errorf("%q has a digest, which only follows from the content: use HOST/REPOSITORY:TAG", s)
	}
	return tag, nil
}

func (u *uploader) publish(ctx context.Context, ref name.Tag, src *Source, to Target, maps []*image.Pagemap, files []stateFile, config *checkpoint.Config) (*Result, error) {
	earlier := &earlier{}
	if to.Envelope == nil {
		var err error
		if earlier, err = u.earlier(ctx, ref, src, to.Reuse); err != nil {
			return nil, err
		}
	}
	var (
		mem     memory
		state   v1.Descriptor
		changes *layer
	)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		mem, err = u.uploadMemory(gctx, src.Images, maps, &earlier.known, to.Envelope != nil)
		return err
	})
	g.Go(func() (err error) {
		state, err = u.uploadState(gctx, files, to.Envelope)
		return err
	})
	g.Go(func() (err error) {
		changes, err = u.uploadRootfs(gctx, src)
		return err
	})
	for _, l := range src.Base.Layers {
		g.Go(func() error { return u.ensure(gctx, l) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}

	config.Memory.Zero, config.Memory.Compressed, config.Memory.Reused = mem.stats.Zero, mem.stats.Compressed, mem.stats.Reused
	cp, err := u.checkpointManifest(ctx, config, state, mem, earlier, to.Envelope)
	if err != nil {
		return nil, err
	}
	run, err := u.runnableManifest(ctx, src, changes, cp.Digest)
	if err != nil {
		return nil, err
	}
	p, err := json.Marshal(v1.Index{
		Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: v1.MediaTypeImageIndex,
		Manifests: []v1.Descriptor{run, cp},
	})
	if err != nil {
		return nil, err
	}
	if err := u.manifest(ctx, ref, v1.MediaTypeImageIndex, p); err != nil {
		return nil, err
	}
	d := digest.FromBytes(p)
	u.meter.mu.Lock()
	defer u.meter.mu.Unlock()
	r := &Result{Reference: ref.Context().Digest(d.String()).String(), Digest: d, Config: config, Uploaded: u.meter.now.Uploaded}
	if to.Envelope != nil && changes != nil {
		r.Plain = changes.desc.Size
	}
	return r, nil
}

// checkpointManifest uploads what describes the checkpoint and its manifest, and
// returns the latter's descriptor for the index.
func (u *uploader) checkpointManifest(ctx context.Context, c *checkpoint.Config, state v1.Descriptor, mem memory, earlier *earlier, envelope *wrap.Envelope) (v1.Descriptor, error) {
	p, err := mem.index.Encode()
	if err != nil {
		return v1.Descriptor{}, err
	}
	index, err := u.uploadIndex(ctx, p, mem, envelope)
	if err != nil {
		return v1.Descriptor{}, err
	}
	if p, err = json.Marshal(c); err != nil {
		return v1.Descriptor{}, err
	}
	config, err := u.bytes(ctx, checkpoint.MediaTypeConfig, p)
	if err != nil {
		return v1.Descriptor{}, err
	}
	layers := []v1.Descriptor{state, index}
	for i := range mem.index.Blobs {
		b := &mem.index.Blobs[i]
		desc := v1.Descriptor{MediaType: mediaType(checkpoint.MediaTypePages, envelope != nil), Digest: b.Digest, Size: b.Size()}
		if i >= mem.fresh {
			if err := u.ensure(ctx, BaseLayer{Descriptor: desc, Repositories: earlier.repositories[b.Digest]}); err != nil {
				return v1.Descriptor{}, err
			}
		}
		layers = append(layers, desc)
	}
	m := v1.Manifest{
		Versioned:    specs.Versioned{SchemaVersion: 2},
		MediaType:    v1.MediaTypeImageManifest,
		ArtifactType: checkpoint.ArtifactType,
		Config:       config,
		Layers:       layers,
		Annotations:  map[string]string{v1.AnnotationCreated: c.Created.Format("2006-01-02T15:04:05Z07:00")},
	}
	if c.Container.Name != "" {
		m.Annotations[checkpoint.AnnotationName] = c.Container.Name
	}
	desc, err := u.putManifest(ctx, m)
	desc.ArtifactType = checkpoint.ArtifactType
	desc.Annotations = map[string]string{checkpoint.AnnotationArtifactType: checkpoint.ArtifactType}
	desc.Platform = &v1.Platform{OS: "unknown", Architecture: "unknown"}
	return desc, err
}

// runnableManifest uploads the runnable image's config and manifest.
func (u *uploader) runnableManifest(ctx context.Context, src *Source, changes *layer, id digest.Digest) (v1.Descriptor, error) {
	p, platform, err := runnableConfig(src.Base.Config, changes, id, src.Created)
	if err != nil {
		return v1.Descriptor{}, err
	}
	config, err := u.bytes(ctx, v1.MediaTypeImageConfig, p)
	if err != nil {
		return v1.Descriptor{}, err
	}
	m := v1.Manifest{
		Versioned:   specs.Versioned{SchemaVersion: 2},
		MediaType:   v1.MediaTypeImageManifest,
		Config:      config,
		Layers:      []v1.Descriptor{}, // never null
		Annotations: map[string]string{},
	}
	for _, l := range src.Base.Layers {
		m.Layers = append(m.Layers, ociLayer(l.Descriptor))
	}
	if changes != nil {
		m.Layers = append(m.Layers, changes.desc)
	}
	if src.Base.Reference != "" {
		m.Annotations[v1.AnnotationBaseImageName] = src.Base.Reference
	}
	if src.Base.Digest != "" {
		m.Annotations[v1.AnnotationBaseImageDigest] = src.Base.Digest.String()
	}
	desc, err := u.putManifest(ctx, m)
	desc.Platform = &platform
	return desc, err
}

func (u *uploader) putManifest(ctx context.Context, m v1.Manifest) (v1.Descriptor, error) {
	p, err := json.Marshal(m)
	if err != nil {
		return v1.Descriptor{}, err
	}
	if len(p) > checkpoint.MaxManifestSize {
		return v1.Descriptor{}, errors.New("the checkpoint has too many layers for one manifest")
	}
	d := digest.FromBytes(p)
	return v1.Descriptor{MediaType: m.MediaType, Digest: d, Size: int64(len(p))},
		u.manifest(ctx, u.repo.Digest(d.String()), m.MediaType, p)
}
