// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// runnable is the image in an index that a runtime pulls.
type runnable struct {
	at       digest.Digest
	manifest v1.Manifest
	config   []byte
}

// pullRunnable reads the manifest of an index that is not the checkpoint's.
func (s *Source) pullRunnable(ctx context.Context, x *v1.Index, checkpoint digest.Digest) error {
	n := slices.IndexFunc(x.Manifests, func(d v1.Descriptor) bool { return d.Digest != checkpoint })
	s.runnable.at = x.Manifests[n].Digest
	m, err := remote.Get(s.repo.Digest(s.runnable.at.String()), remote.WithContext(ctx))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(m.Manifest, &s.runnable.manifest); err != nil {
		return err
	}
	s.runnable.config, err = s.blob(ctx, s.runnable.manifest.Config)
	return err
}

// pushRunnable pushes it with more labels, and puts it into an index.
func (s *Source) pushRunnable(ctx context.Context, x *v1.Index, labels map[string]string) error {
	var img v1.Image
	if err := json.Unmarshal(s.runnable.config, &img); err != nil {
		return err
	}
	if img.Config.Labels == nil {
		img.Config.Labels = make(map[string]string)
	}
	maps.Copy(img.Config.Labels, labels)
	config, err := json.Marshal(img)
	if err != nil {
		return err
	}
	m := s.runnable.manifest
	m.Config.Digest, m.Config.Size = digest.FromBytes(config), int64(len(config))
	if err := remote.WriteLayer(s.repo, static.NewLayer(config, types.OCIConfigJSON), remote.WithContext(ctx)); err != nil {
		return err
	}
	content, err := json.Marshal(m)
	if err != nil {
		return err
	}
	n := slices.IndexFunc(x.Manifests, func(d v1.Descriptor) bool { return d.Digest == s.runnable.at })
	x.Manifests[n].Digest, x.Manifests[n].Size = digest.FromBytes(content), int64(len(content))
	return s.put(ctx, s.repo.Digest(digest.FromBytes(content).String()), v1.MediaTypeImageManifest, content)
}
