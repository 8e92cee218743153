// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
)

// Entry is an entry of a tar archive.
type Entry struct {
	tar.Header
	Content []byte
}

// Regular is an entry that is a file.
func Regular(name string, content []byte) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(content)), Mode: 0o600}, content}
}

// Source is a good checkpoint image.
type Source struct {
	repo                               name.Repository
	index, manifest, config, pageIndex []byte
	state                              []Entry
	blobs                              [][]byte
	runnable                           runnable
}

// Image is a copy of a good image that a trick changes: first what is in it, then, in the order of these fields, what
// it is encoded to. Byte slices are shared with the source and must not be written to.
type Image struct {
	State  []Entry // in the order of the archive
	Blobs  [][]byte
	Config checkpoint.Config

	Tar, Compressed, PageIndex, RawConfig func([]byte) []byte
	Manifest                              func(*v1.Manifest)
	RawManifest                           func([]byte) []byte
	Index                                 func(x *v1.Index, at int) // at is the checkpoint's place
	RawIndex                              func([]byte) []byte
	// Labels are added to those of the image that a runtime pulls.
	Labels map[string]string

	// Tampered is what the registry answers in place of blobs: content by the blobs that it is of.
	Tampered map[string]func([]byte) []byte

	pageIndex []byte // of the good image
}

// Kinds of blobs in Image.Tampered.
const (
	kindConfig    = "config"
	kindState     = "state"
	kindPageIndex = "page index"
	kindPages     = "pages"
)

// Pull takes a checkpoint image apart.
func Pull(ctx context.Context, ref string) (*Source, error) {
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		return nil, err
	}
	s := &Source{repo: parsed.Context()}
	top, err := remote.Get(parsed, remote.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	s.index = top.Manifest
	x, err := checkpoint.ParseIndex(s.index)
	if err != nil {
		return nil, err
	}
	desc, err := checkpoint.Find(x)
	if err != nil {
		return nil, err
	}
	m, err := remote.Get(s.repo.Digest(desc.Digest.String()), remote.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	s.manifest = m.Manifest
	img, err := checkpoint.ParseManifest(desc, m.Manifest)
	if err != nil {
		return nil, err
	}
	var state []byte
	for _, b := range []struct {
		desc v1.Descriptor
		to   *[]byte
	}{{img.Config, &s.config}, {img.State, &state}, {img.PageIndex, &s.pageIndex}} {
		if *b.to, err = s.blob(ctx, b.desc); err != nil {
			return nil, err
		}
	}
	for _, d := range img.Pages {
		p, err := s.blob(ctx, d)
		if err != nil {
			return nil, err
		}
		s.blobs = append(s.blobs, p)
	}
	if s.state, err = untar(state); err != nil {
		return nil, err
	}
	return s, s.pullRunnable(ctx, x, desc.Digest)
}

func (s *Source) blob(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	layer, err := remote.Layer(s.repo.Digest(d.Digest.String()), remote.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	r, err := layer.Compressed()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func untar(compressed []byte) ([]Entry, error) {
	z, err := zstd.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	var out []Entry
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		p, err := io.ReadAll(r)
		if err != nil {
			return nil, err
		}
		if h.Typeflag == tar.TypeReg { // not the folder in an archive for convert
			out = append(out, Regular(h.Name, p))
		}
	}
}

// Image returns a copy to be changed.
func (s *Source) Image() (*Image, error) {
	i := &Image{State: slices.Clone(s.state), Blobs: slices.Clone(s.blobs), pageIndex: s.pageIndex, Tampered: make(map[string]func([]byte) []byte)}
	return i, json.Unmarshal(s.config, &i.Config)
}

// Pushed is an image in a registry.
type Pushed struct {
	Reference string
	Index     v1.Descriptor
	Content   []byte // of the index
	// Answers is content that the registry is to give under these digests: in place of blobs, and for manifests that
	// no registry takes.
	Answers map[digest.Digest][]byte
}

// Push encodes an image and pushes it under a tag into the repository that the source is from.
func (s *Source) Push(ctx context.Context, i *Image, tag string) (_ *Pushed, err error) {
	out := &Pushed{Reference: s.repo.Tag(tag).String(), Answers: make(map[digest.Digest][]byte)}
	blob := func(kind, mediaType string, content []byte) v1.Descriptor {
		d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
		if err == nil {
			err = remote.WriteLayer(s.repo, static.NewLayer(content, types.MediaType(mediaType)), remote.WithContext(ctx))
		}
		if f := i.Tampered[kind]; f != nil {
			out.Answers[d.Digest] = f(bytes.Clone(content))
		}
		return d
	}
	config, err := json.Marshal(i.Config)
	if err != nil {
		return nil, err
	}
	var m v1.Manifest
	if err := json.Unmarshal(s.manifest, &m); err != nil {
		return nil, err
	}
	m.Config = blob(kindConfig, checkpoint.MediaTypeConfig, apply(i.RawConfig, config))
	state := apply(i.Compressed, compress(apply(i.Tar, Tar(i.State))))
	m.Layers = []v1.Descriptor{
		blob(kindState, checkpoint.MediaTypeState, state),
		blob(kindPageIndex, checkpoint.MediaTypePageIndex, apply(i.PageIndex, s.pageIndex)),
	}
	for _, b := range i.Blobs {
		m.Layers = append(m.Layers, blob(kindPages, checkpoint.MediaTypePages, b))
	}
	if i.Manifest != nil {
		i.Manifest(&m)
	}
	raw, err2 := json.Marshal(m)
	if err = errors.Join(err, err2); err != nil {
		return nil, err
	}
	raw = apply(i.RawManifest, raw)
	x, err := checkpoint.ParseIndex(s.index)
	if err != nil {
		return nil, err
	}
	found, err := checkpoint.Find(x)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(x.Manifests, func(d v1.Descriptor) bool { return d.Digest == found.Digest })
	x.Manifests[at].Digest, x.Manifests[at].Size = digest.FromBytes(raw), int64(len(raw))
	if len(i.Labels) > 0 {
		if err := s.pushRunnable(ctx, x, i.Labels); err != nil {
			return nil, err
		}
	}
	if err := s.put(ctx, s.repo.Digest(digest.FromBytes(raw).String()), v1.MediaTypeImageManifest, raw); err != nil {
		out.Answers[digest.FromBytes(raw)] = raw
	}
	if i.Index != nil {
		i.Index(x, at)
	}
	if out.Content, err = json.Marshal(x); err != nil {
		return nil, err
	}
	out.Content = apply(i.RawIndex, out.Content)
	out.Index = v1.Descriptor{MediaType: v1.MediaTypeImageIndex, Digest: digest.FromBytes(out.Content), Size: int64(len(out.Content))}
	if err := s.put(ctx, s.repo.Tag(tag), v1.MediaTypeImageIndex, out.Content); err != nil {
		out.Answers[out.Index.Digest] = out.Content
	}
	return out, nil
}

func apply(f func([]byte) []byte, p []byte) []byte {
	if f == nil {
		return p
	}
	return f(bytes.Clone(p))
}

// Tar encodes an archive, as wrong as its entries are.
func Tar(entries []Entry) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range entries {
		h := entries[i].Header
		must(w.WriteHeader(&h))
		_, err := w.Write(entries[i].Content)
		must(err)
	}
	must(w.Close())
	return b.Bytes()
}

func compress(p []byte) []byte {
	z, err := zstd.NewWriter(nil)
	must(err)
	defer z.Close()
	return z.EncodeAll(p, nil)
}

// must ends the program at a mistake in a trick itself.
func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("hostile: %v", err))
	}
}

// put pushes a manifest as it stands; go-containerregistry would put it in order.
func (s *Source) put(ctx context.Context, ref name.Reference, mediaType string, content []byte) error {
	return remote.Put(ref, raw{content, mediaType}, remote.WithContext(ctx))
}

type raw struct {
	content   []byte
	mediaType string
}

func (r raw) RawManifest() ([]byte, error)        { return r.content, nil }
func (r raw) MediaType() (types.MediaType, error) { return types.MediaType(r.mediaType), nil }
func (r raw) Digest() (ggcr.Hash, error)          { return ggcr.NewHash(digest.FromBytes(r.content).String()) }
func (r raw) Size() (int64, error)                { return int64(len(r.content)), nil }
