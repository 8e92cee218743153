// SPDX-License-Identifier: Apache-2.0

//go:build linux

package baseline

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// chunkSize is the unit in which eStargz compresses and verifies files, and so the least that a page fault fetches. Of 128, 256 and
// 512 KiB, 1 MiB and the format's usual 4 MiB, this gave the synthetic server of 512 MiB its first reply soonest.
const chunkSize = 512 << 10

// exists says whether a registry has an image.
func exists(ctx context.Context, ref name.Reference) bool {
	_, err := remote.Head(ref, remote.WithContext(ctx))
	return err == nil
}

// pushEstargz writes the files of a folder to a registry, as an image of one eStargz layer. Temporary files go to work.
func pushEstargz(ctx context.Context, dir, work string, to name.Reference) (err error) {
	work, err = os.MkdirTemp(work, "estargz-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	layer, toc, err := packEstargz(ctx, dir, work)
	if err != nil {
		return err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.Append(base, mutate.Addendum{
		Layer: layer, MediaType: types.OCILayer, Annotations: map[string]string{estargz.TOCJSONDigestAnnotation: toc},
	})
	if err != nil {
		return err
	}
	return remote.Write(to, image, remote.WithContext(ctx))
}

// packEstargz makes the layer as a file in work, and the digest of its table of contents. No file is marked to be prefetched,
// because all of the memory is in one.
func packEstargz(ctx context.Context, dir, work string) (_ v1.Layer, toc string, err error) {
	archive, err := os.Create(filepath.Join(work, "tar"))
	if err != nil {
		return nil, "", err
	}
	defer archive.Close()
	if err := writeTar(archive, dir); err != nil {
		return nil, "", err
	}
	size, err := archive.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, "", err
	}
	blob, err := estargz.Build(io.NewSectionReader(archive, 0, size), estargz.WithContext(ctx),
		estargz.WithChunkSize(chunkSize), estargz.WithCompressionLevel(gzip.DefaultCompression))
	if err != nil {
		return nil, "", err
	}
	l := &fileLayer{path: filepath.Join(work, "layer")}
	if err := errors.Join(l.write(blob), blob.Close()); err != nil {
		return nil, "", err
	}
	if l.diffID, err = v1.NewHash(blob.DiffID().String()); err != nil {
		return nil, "", err
	}
	layer, err := partial.CompressedToLayer(l)
	return layer, blob.TOCDigest().String(), err
}

// writeTar archives the regular files of a folder.
func writeTar(to io.Writer, dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	archive := tar.NewWriter(to)
	for _, f := range files {
		if err := addFile(archive, filepath.Join(dir, f.Name())); err != nil {
			return err
		}
	}
	return archive.Close()
}

func addFile(archive *tar.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := archive.WriteHeader(&tar.Header{Name: info.Name(), Size: info.Size(), Mode: 0o600}); err != nil {
		return err
	}
	_, err = io.Copy(archive, f)
	return err
}

// fileLayer is a compressed layer in a file. Unlike go-containerregistry's own, it needs no decompression to know its diff ID.
type fileLayer struct {
	path           string
	digest, diffID v1.Hash
	size           int64
}

func (l *fileLayer) write(from io.Reader) error {
	f, err := os.Create(l.path)
	if err != nil {
		return err
	}
	sum := sha256.New()
	l.size, err = io.Copy(io.MultiWriter(f, sum), from)
	l.digest = v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}
	return errors.Join(err, f.Close())
}

func (l *fileLayer) Digest() (v1.Hash, error)            { return l.digest, nil }
func (l *fileLayer) DiffID() (v1.Hash, error)            { return l.diffID, nil }
func (l *fileLayer) Compressed() (io.ReadCloser, error)  { return os.Open(l.path) }
func (l *fileLayer) Size() (int64, error)                { return l.size, nil }
func (l *fileLayer) MediaType() (types.MediaType, error) { return types.OCILayer, nil }
