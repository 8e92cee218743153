// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/workingset"
)

// What is pushed is found by nodes as a referrer of the image's index, which stays the same; here under a tag, because this
// registry lacks the referrers API.
func TestPushWorkingSet(t *testing.T) {
	reg := newRegistry(t)
	pushBase(t, reg.ref("base/app:1"))
	ctx := context.Background()
	image, err := publish.Publish(ctx, openArchive(t, reg.ref("base/app:1")).Source, publish.Target{Reference: reg.ref("cp/app:1")})
	if err != nil {
		t.Fatal(err)
	}
	img, err := publish.Read(ctx, reg.ref("cp/app:1"), "")
	if err != nil {
		t.Fatal(err)
	}
	set := &workingset.Set{Checkpoint: img.Checkpoint.Manifest.Digest, Chunks: []workingset.Chunk{{Chunk: 3}, {Chunk: 1}}}
	pushed, err := publish.PushWorkingSet(ctx, img, set, "")
	if err != nil {
		t.Fatal(err)
	}
	again, err := publish.Read(ctx, reg.ref("cp/app:1"), "")
	if err != nil || !strings.HasSuffix(again.Reference, image.Digest.String()) {
		t.Errorf("the image is %s now, it was %s: %v", again.Reference, image.Digest, err)
	}
	client := registry.New(registry.Options{Hosts: registry.Hosts(ctx, registry.HostOptions{})})
	repo, err := client.Repository(reg.ref("cp/app:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	list, err := repo.Referrers(ctx, image.Digest, workingset.ArtifactType)
	if err != nil || len(list) != 1 || list[0].Annotations[v1.AnnotationCreated] == "" || !strings.HasSuffix(pushed, list[0].Digest.String()) {
		t.Fatalf("pushed %s, found %+v, %v", pushed, list, err)
	}
	ref, err := name.NewDigest(pushed)
	if err != nil {
		t.Fatal(err)
	}
	m, err := remote.Image(ref)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := m.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	want, err := set.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if d, err := layers[0].Digest(); err != nil || d.String() != digest.FromBytes(want).String() {
		t.Errorf("layer %s, %v", d, err)
	}

	set.Checkpoint = digest.FromString("other")
	if _, err := publish.PushWorkingSet(ctx, img, set, ""); !errors.Is(err, workingset.ErrFormat) {
		t.Errorf("a set of another checkpoint: %v", err)
	}
	set.Checkpoint = img.Checkpoint.Manifest.Digest
	reg.fail = func(r *http.Request) int {
		if r.Method == http.MethodPost {
			return http.StatusForbidden
		}
		return 0
	}
	set.Chunks = set.Chunks[1:]
	if _, err := publish.PushWorkingSet(ctx, img, set, ""); err == nil || !strings.Contains(err.Error(), "log in") {
		t.Errorf("a push that is refused: %v", err)
	}
}
