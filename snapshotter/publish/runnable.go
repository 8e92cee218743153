// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
)

// layer is a layer that was uploaded.
type layer struct {
	desc   v1.Descriptor
	diffID digest.Digest
}

// uploadRootfs uploads the changes in the root filesystem as a layer. It returns
// nil if there are none.
func (u *uploader) uploadRootfs(ctx context.Context, src *Source) (*layer, error) {
	if src.Rootfs == nil {
		return nil, nil
	}
	empty, err := isEmpty(ctx, src)
	if err != nil || empty {
		return nil, err
	}
	l := &layer{}
	l.desc, err = u.stream(ctx, v1.MediaTypeImageLayerZstd, func(w io.Writer) error {
		rc, err := src.Rootfs(ctx)
		if err != nil {
			return err
		}
		defer rc.Close()
		l.diffID, err = recompress(w, rc, src.Deleted)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("changes in the root filesystem: %w", err)
	}
	return l, nil
}

func isEmpty(ctx context.Context, src *Source) (bool, error) {
	if len(src.Deleted) > 0 {
		return false, nil
	}
	rc, err := src.Rootfs(ctx)
	if err != nil {
		return false, err
	}
	defer rc.Close()
	r, err := Decompressed(rc)
	if err != nil {
		return false, err
	}
	defer r.Close()
	_, err = tar.NewReader(r).Next()
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// recompress writes a layer as tar+zstd and returns the digest of the tar.
func recompress(w io.Writer, layer io.Reader, deleted []string) (digest.Digest, error) {
	r, err := Decompressed(layer)
	if err != nil {
		return "", err
	}
	defer r.Close()
	zw, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedDefault))
	if err != nil {
		return "", err
	}
	defer zw.Close()
	sum := digest.SHA256.Digester()
	out := io.MultiWriter(zw, sum.Hash())
	if len(deleted) == 0 {
		_, err = io.Copy(out, r)
	} else {
		err = withWhiteouts(out, r, deleted)
	}
	if err != nil {
		return "", err
	}
	return sum.Digest(), zw.Close()
}

// withWhiteouts copies a layer and adds whiteouts for deleted paths (OCI image
// spec, layer.md).
func withWhiteouts(w io.Writer, r io.Reader, deleted []string) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(tw, tr); err != nil {
			return err
		}
	}
	deleted = slices.Clone(deleted)
	slices.Sort(deleted)
	for _, p := range deleted {
		dir, base := path.Split(strings.TrimPrefix(path.Clean("/"+p), "/"))
		if base == "" {
			continue
		}
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: dir + ".wh." + base, Mode: 0o600}); err != nil {
			return err
		}
	}
	return tw.Close()
}

// maxWindow bounds the memory that decompressing somebody's zstd stream takes.
const maxWindow = 128 << 20

// Decompressed returns the content of a stream that is plain or compressed by
// gzip or zstd.
func Decompressed(r io.Reader) (io.ReadCloser, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	head, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return gzip.NewReader(br)
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		zr, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		return zr.IOReadCloser(), nil
	}
	return io.NopCloser(br), nil
}

// runnableConfig is the base image's config for the runnable image: with the
// layer of changes, if there is one, and the checkpoint's digest as a label.
// What it does not understand stays as it is.
func runnableConfig(base []byte, changes *layer, id digest.Digest, created time.Time) (config []byte, platform v1.Platform, err error) {
	var whole map[string]json.RawMessage
	if err := json.Unmarshal(base, &whole); err != nil {
		return nil, platform, fmt.Errorf("config of the base image: %w", err)
	}
	var img v1.Image
	if err := json.Unmarshal(base, &img); err != nil {
		return nil, platform, fmt.Errorf("config of the base image: %w", err)
	}
	var settings map[string]json.RawMessage
	if raw, ok := whole["config"]; ok {
		if err := json.Unmarshal(raw, &settings); err != nil {
			return nil, platform, fmt.Errorf("config of the base image: %w", err)
		}
	}
	if settings == nil {
		settings = make(map[string]json.RawMessage)
	}
	labels := img.Config.Labels
	if labels == nil {
		labels = make(map[string]string)
	}
	labels[checkpoint.LabelID] = id.String()
	created = created.UTC()
	if changes != nil {
		img.RootFS.DiffIDs = append(img.RootFS.DiffIDs, changes.diffID)
		img.History = append(img.History, v1.History{Created: &created, CreatedBy: "thaw checkpoint", Comment: "changes of the checkpointed container"})
	}
	set := func(in map[string]json.RawMessage, key string, value any) {
		var p []byte
		if p, err = json.Marshal(value); err == nil {
			in[key] = p
		}
	}
	set(settings, "Labels", labels)
	set(whole, "config", settings)
	set(whole, "rootfs", img.RootFS)
	set(whole, "history", img.History)
	set(whole, "created", created)
	if err != nil {
		return nil, platform, err
	}
	config, err = json.Marshal(whole)
	return config, v1.Platform{Architecture: img.Architecture, OS: img.OS, Variant: img.Variant}, err
}

// ociLayer is a base layer's descriptor with OCI's media type in place of
// Docker's: the two mean the same, but do not mix in one manifest.
func ociLayer(d v1.Descriptor) v1.Descriptor {
	d.URLs, d.Platform, d.Data = nil, nil, nil
	switch d.MediaType {
	case "application/vnd.docker.image.rootfs.diff.tar":
		d.MediaType = v1.MediaTypeImageLayer
	case "application/vnd.docker.image.rootfs.diff.tar.gzip", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip":
		d.MediaType = v1.MediaTypeImageLayerGzip
	case "application/vnd.docker.image.rootfs.diff.tar.zstd":
		d.MediaType = v1.MediaTypeImageLayerZstd
	}
	return d
}
