// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/registry"
)

// Image is a checkpoint image in a registry.
type Image struct {
	// Reference is its name with the digest of the index.
	Reference string
	// Index is the OCI index.
	Index v1.Index
	// Checkpoint is the checkpoint manifest, taken apart.
	Checkpoint *checkpoint.Image

	descriptor v1.Descriptor // of the index
	repo       name.Repository
	opts       []remote.Option
}

func pullOptions(ctx context.Context, certsDir string) []remote.Option {
	return []remote.Option{
		remote.WithAuthFromKeychain(authn.DefaultKeychain), remote.WithContext(ctx),
		remote.WithTransport(registry.NewPullTransport(ctx, certsDir)),
	}
}

// Read reads the manifests of a checkpoint image. An ordinary image is
// checkpoint.ErrNoCheckpoint.
func Read(ctx context.Context, reference, certsDir string) (*Image, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return nil, fmt.Errorf("%q is no image reference: use HOST/REPOSITORY:TAG", reference)
	}
	img, err := read(ref, pullOptions(ctx, certsDir))
	if err != nil {
		return nil, explain("pull", ref, err)
	}
	return img, nil
}

func read(ref name.Reference, opts []remote.Option) (*Image, error) {
	desc, err := remote.Get(ref, opts...)
	if err != nil {
		return nil, err
	}
	if desc.MediaType != types.OCIImageIndex {
		return nil, checkpoint.ErrNoCheckpoint
	}
	img := &Image{
		Reference:  ref.Context().Digest(desc.Digest.String()).String(),
		descriptor: v1.Descriptor{MediaType: string(desc.MediaType), Digest: digest.Digest(desc.Digest.String()), Size: desc.Size},
		repo:       ref.Context(), opts: opts,
	}
	if len(desc.Manifest) > checkpoint.MaxManifestSize {
		return nil, fmt.Errorf("%w: index of %d bytes", checkpoint.ErrFormat, len(desc.Manifest))
	}
	x, err := checkpoint.ParseIndex(desc.Manifest)
	if err != nil {
		return nil, err
	}
	img.Index = *x
	m, err := checkpoint.Find(&img.Index)
	if err != nil {
		return nil, err
	}
	md, err := remote.Get(img.repo.Digest(m.Digest.String()), opts...)
	if err != nil {
		return nil, err
	}
	img.Checkpoint, err = checkpoint.ParseManifest(m, md.Manifest)
	return img, err
}

// Config reads the checkpoint's config.
func (i *Image) Config(ctx context.Context) (*checkpoint.Config, error) {
	p, err := i.blob(ctx, i.Checkpoint.Config, checkpoint.MaxConfigSize)
	if err != nil {
		return nil, err
	}
	return checkpoint.ParseConfig(p)
}

// ErrEncrypted means that the page index of an image cannot be read: it is encrypted.
var ErrEncrypted = errors.New("the checkpoint is encrypted, and no chunk of its memory can be shared")

// PageIndex reads the checkpoint's page index. That of an encrypted one is ErrEncrypted.
func (i *Image) PageIndex(ctx context.Context) (*pageindex.Index, error) {
	if i.Checkpoint.Keys != nil {
		return nil, ErrEncrypted
	}
	p, err := i.blob(ctx, i.Checkpoint.PageIndex, pageindex.MaxEncodedSize)
	if err != nil {
		return nil, err
	}
	return pageindex.Parse(p)
}

// blob reads a blob into memory and checks it against its digest.
func (i *Image) blob(ctx context.Context, d v1.Descriptor, limit int64) ([]byte, error) {
	if d.Size > limit {
		return nil, fmt.Errorf("%w: %s of %d bytes is over the limit of %d", checkpoint.ErrFormat, d.MediaType, d.Size, limit)
	}
	l, err := remote.Layer(i.repo.Digest(d.Digest.String()), append(i.opts[:len(i.opts):len(i.opts)], remote.WithContext(ctx))...)
	if err != nil {
		return nil, err
	}
	rc, err := l.Compressed()
	if err != nil {
		return nil, err
	}
	defer rc.Close()
	p := make([]byte, d.Size)
	if _, err := io.ReadFull(rc, p); err != nil {
		return nil, fmt.Errorf("%w: %s is cut short: %w", checkpoint.ErrFormat, d.Digest, err)
	}
	if got := digest.FromBytes(p); got != d.Digest {
		return nil, fmt.Errorf("%w: content of %s has digest %s", checkpoint.ErrFormat, d.Digest, got)
	}
	return p, nil
}

// BaseFromRegistry reads an ordinary image for one platform, as the base of a
// checkpoint.
func BaseFromRegistry(ctx context.Context, reference, certsDir string, platform v1.Platform) (*Base, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return nil, fmt.Errorf("base image: %q is no image reference", reference)
	}
	opts := append(pullOptions(ctx, certsDir), remote.WithPlatform(ggcr.Platform{OS: platform.OS, Architecture: platform.Architecture, Variant: platform.Variant}))
	desc, err := remote.Get(ref, opts...)
	if err != nil {
		return nil, fmt.Errorf("base image: %w", explain("pull", ref, err))
	}
	img, err := desc.Image()
	if err != nil {
		return nil, fmt.Errorf("base image %s for %s/%s: %w", reference, platform.OS, platform.Architecture, err)
	}
	b := &Base{Reference: reference, Digest: digest.Digest(desc.Digest.String())}
	if b.Config, err = img.RawConfigFile(); err != nil {
		return nil, fmt.Errorf("base image %s: %w", reference, err)
	}
	p, err := img.RawManifest()
	if err != nil {
		return nil, fmt.Errorf("base image %s: %w", reference, err)
	}
	var m v1.Manifest
	if err := json.Unmarshal(p, &m); err != nil {
		return nil, fmt.Errorf("base image %s: %w", reference, err)
	}
	for _, l := range m.Layers {
		b.Layers = append(b.Layers, BaseLayer{Descriptor: l, Repositories: []string{ref.Context().Name()}})
	}
	return b, nil
}
