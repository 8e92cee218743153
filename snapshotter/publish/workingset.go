// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/workingset"
)

// PushWorkingSet publishes a working set beside the checkpoint image that it is
// of, as a manifest whose subject is the image's index: the image and its digest
// stay what they are. In registries without the referrers API it is listed under
// the tag that the OCI distribution specification has for that. Earlier sets stay;
// the newest counts. The manifest's reference is returned.
func PushWorkingSet(ctx context.Context, img *Image, set *workingset.Set, certsDir string) (string, error) {
	if want := img.Checkpoint.Manifest.Digest; set.Checkpoint != want {
		return "", fmt.Errorf("%w: it is one of checkpoint %s, the image holds %s", workingset.ErrFormat, set.Checkpoint, want)
	}
	p, err := set.Encode()
	if err != nil {
		return "", err
	}
	u, err := newUploader(ctx, img.repo, certsDir, &meter{})
	if err != nil {
		return "", err
	}
	ref, err := u.workingSet(ctx, img.descriptor, p)
	if err != nil {
		return "", explain("push", img.repo.Digest(img.descriptor.Digest.String()), err)
	}
	return ref.String(), nil
}

func (u *uploader) workingSet(ctx context.Context, subject v1.Descriptor, set []byte) (ref name.Digest, err error) {
	m := v1.Manifest{
		Versioned:    specs.Versioned{SchemaVersion: 2},
		MediaType:    v1.MediaTypeImageManifest,
		ArtifactType: workingset.ArtifactType,
		Subject:      &subject,
		Annotations:  map[string]string{v1.AnnotationCreated: time.Now().UTC().Format(time.RFC3339)},
	}
	// Registries that do not know artifactType take the config's media type for it.
	if m.Config, err = u.bytes(ctx, workingset.ArtifactType, []byte("{}")); err != nil {
		return ref, err
	}
	layer, err := u.bytes(ctx, workingset.MediaType, set)
	if err != nil {
		return ref, err
	}
	m.Layers = []v1.Descriptor{layer}
	p, err := json.Marshal(&m)
	if err != nil {
		return ref, err
	}
	ref = u.repo.Digest(digest.FromBytes(p).String())
	return ref, u.manifest(ctx, ref, m.MediaType, p)
}
