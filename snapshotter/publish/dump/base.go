// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	refdocker "github.com/distribution/reference"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/criulog"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/publish"
)

// baseOf describes the image that a container was made from, as containerd has
// it, or as its registry has it if containerd does not any more.
func baseOf(ctx context.Context, client *containerd.Client, c *Container, opts Options) (*publish.Base, error) {
	name := opts.Base
	if name == "" {
		name = c.info.Image
	}
	// What the pod asked for says more than the ID by which CRI knows the image.
	reference := name
	if asked := c.spec.Annotations[annotationImage]; asked != "" && opts.Base == "" {
		reference = asked
	}
	if name == "" && reference == "" {
		return nil, fmt.Errorf("containerd does not know the image of container %s: name it with --base", short(c.info.ID))
	}
	img, err := client.ImageService().Get(ctx, name)
	if errdefs.IsNotFound(err) {
		b, err := publish.BaseFromRegistry(ctx, reference, opts.CertsDir, platforms.DefaultSpec())
		if err != nil {
			return nil, fmt.Errorf("containerd no longer has the image of container %s: %w", short(c.info.ID), err)
		}
		return b, nil
	}
	if err != nil {
		return nil, err
	}
	store := client.ContentStore()
	desc, err := manifestDescriptor(ctx, store, img.Target)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", reference, err)
	}
	m, err := images.Manifest(ctx, store, img.Target, platforms.Default())
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", reference, err)
	}
	b := &publish.Base{Reference: reference, Digest: img.Target.Digest}
	if b.Config, err = content.ReadBlob(ctx, store, m.Config); err != nil {
		return nil, fmt.Errorf("config of image %s: %w", reference, err)
	}
	// Layers that were discarded after unpacking have lost their labels; the
	// manifest came from the same repositories.
	usual := append(repositoryOf(reference), sources(ctx, store, desc)...)
	for _, l := range m.Layers {
		bl := publish.BaseLayer{Descriptor: l, Repositories: append(usual[:len(usual):len(usual)], sources(ctx, store, l)...)}
		if info, err := store.Info(ctx, l.Digest); err == nil && info.Size == l.Size {
			bl.Open = contentOpener(c.Namespace, store, l)
		}
		b.Layers = append(b.Layers, bl)
	}
	return b, nil
}

// manifestDescriptor finds the manifest for this platform.
func manifestDescriptor(ctx context.Context, store content.Provider, target v1.Descriptor) (v1.Descriptor, error) {
	if !images.IsIndexType(target.MediaType) {
		return target, nil
	}
	p, err := content.ReadBlob(ctx, store, target)
	if err != nil {
		return v1.Descriptor{}, err
	}
	var x v1.Index
	if err := json.Unmarshal(p, &x); err != nil {
		return v1.Descriptor{}, err
	}
	match := platforms.Default()
	for _, m := range x.Manifests {
		if m.Platform == nil || match.Match(*m.Platform) {
			return m, nil
		}
	}
	return v1.Descriptor{}, fmt.Errorf("nothing in it is for %s: %w", platforms.DefaultString(), errdefs.ErrNotFound)
}

// repositoryOf is the repository that a reference names, if it is one.
func repositoryOf(reference string) []string {
	spec, err := refdocker.ParseDockerRef(reference)
	if err != nil {
		return nil
	}
	return []string{spec.Name()}
}

// distributionSource is the beginning of the label in which containerd records
// where content came from: "containerd.io/distribution.source.HOST" is
// "REPOSITORY,REPOSITORY", HOST without its port.
const distributionSource = "containerd.io/distribution.source."

func sources(ctx context.Context, store content.Store, d v1.Descriptor) []string {
	info, err := store.Info(ctx, d.Digest)
	if err != nil {
		return nil
	}
	var out []string
	for k, v := range info.Labels {
		host, ok := strings.CutPrefix(k, distributionSource)
		if !ok {
			continue
		}
		for repo := range strings.SplitSeq(v, ",") {
			if repo != "" {
				out = append(out, host+"/"+repo)
			}
		}
	}
	return out
}

// contentOpener opens content of containerd's store.
func contentOpener(namespace string, store content.Provider, d v1.Descriptor) func(context.Context) (io.ReadCloser, error) {
	return func(ctx context.Context) (io.ReadCloser, error) {
		ctx = namespaces.WithNamespace(ctx, namespace)
		ra, err := store.ReaderAt(ctx, d)
		if err != nil {
			return nil, err
		}
		return &contentReader{Reader: content.NewReader(ra), ra: ra}, nil
	}
}

type contentReader struct {
	io.Reader
	ra content.ReaderAt
}

func (r *contentReader) Close() error { return r.ra.Close() }

// describe fills in what the images do not tell.
func describe(src *publish.Source, c *Container, work string) {
	src.Container = checkpoint.Container{
		Name:     c.Name(),
		ID:       c.info.ID,
		Terminal: c.spec.Process != nil && c.spec.Process.Terminal,
		GPU:      usesGPU(c),
	}
	src.Host = checkpoint.Host{Architecture: runtime.GOARCH, Runtime: c.info.Runtime.Name}
	if features, err := criu.CPUFeatures(); err == nil {
		src.Host.CPUFeatures = features
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		src.Host.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if f, err := os.Open(filepath.Join(work, criulog.Dump)); err == nil {
		src.Host.CRIU = versionIn(f)
		f.Close()
	}
}

func usesGPU(c *Container) bool {
	for _, d := range c.spec.Linux.Devices {
		if strings.HasPrefix(d.Path, "/dev/nvidia") || strings.HasPrefix(d.Path, "/dev/dri/") || d.Path == "/dev/kfd" {
			return true
		}
	}
	return false
}
