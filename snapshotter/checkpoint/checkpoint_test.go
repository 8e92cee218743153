// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

func descriptor(mediaType, content string) v1.Descriptor {
	return v1.Descriptor{MediaType: mediaType, Digest: digest.FromString(content), Size: int64(len(content))}
}

func TestFind(t *testing.T) {
	image := descriptor(v1.MediaTypeImageManifest, "image")
	typed := descriptor(v1.MediaTypeImageManifest, "checkpoint")
	typed.ArtifactType = ArtifactType
	annotated := descriptor(v1.MediaTypeImageManifest, "checkpoint")
	annotated.Annotations = map[string]string{AnnotationArtifactType: ArtifactType}
	next := typed
	next.ArtifactType = "application/vnd.thaw.checkpoint.v2"
	nextAnnotated := annotated
	nextAnnotated.Annotations = map[string]string{AnnotationArtifactType: next.ArtifactType}
	large := typed
	large.Size = MaxManifestSize + 1
	attestation := image
	attestation.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}

	for name, tc := range map[string]struct {
		manifests []v1.Descriptor
		want      error
		says      string
	}{
		"artifact type":      {[]v1.Descriptor{image, typed}, nil, ""},
		"annotation":         {[]v1.Descriptor{annotated, image}, nil, ""},
		"with attestation":   {[]v1.Descriptor{image, attestation, typed}, nil, ""},
		"none":               {[]v1.Descriptor{image, attestation}, ErrNoCheckpoint, ""},
		"empty":              {nil, ErrNoCheckpoint, ""},
		"two":                {[]v1.Descriptor{typed, annotated}, ErrFormat, "two checkpoints"},
		"version":            {[]v1.Descriptor{image, next}, ErrFormat, `version "2" is not supported`},
		"version annotation": {[]v1.Descriptor{image, nextAnnotated}, ErrFormat, `version "2" is not supported`},
		"size":               {[]v1.Descriptor{large}, ErrFormat, "bytes"},
	} {
		got, err := Find(&v1.Index{Manifests: tc.manifests})
		if !errors.Is(err, tc.want) || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && got.Digest != typed.Digest {
			t.Errorf("%s: found %s", name, got.Digest)
		}
	}
}

func manifest() v1.Manifest {
	return v1.Manifest{
		MediaType: v1.MediaTypeImageManifest, ArtifactType: ArtifactType,
		Config: descriptor(MediaTypeConfig, "config"),
		Layers: []v1.Descriptor{
			descriptor(MediaTypeState, "state"), descriptor(MediaTypePageIndex, "index"),
			descriptor(MediaTypePages, "one"), descriptor(MediaTypePages, "two"),
		},
	}
}

func TestParseManifest(t *testing.T) {
	p, err := json.Marshal(manifest())
	if err != nil {
		t.Fatal(err)
	}
	img, err := ParseManifest(descriptor(v1.MediaTypeImageManifest, string(p)), p)
	if err != nil {
		t.Fatal(err)
	}
	if img.State.Digest != digest.FromString("state") || img.PageIndex.Digest != digest.FromString("index") || len(img.Pages) != 2 {
		t.Errorf("%+v", img)
	}
	for name, lie := range map[string]func(*v1.Manifest){
		"artifact type": func(m *v1.Manifest) { m.ArtifactType = "application/x" },
		"config type":   func(m *v1.Manifest) { m.Config.MediaType = v1.MediaTypeImageConfig },
		"two states":    func(m *v1.Manifest) { m.Layers = append(m.Layers, descriptor(MediaTypeState, "x")) },
		"two indexes":   func(m *v1.Manifest) { m.Layers = append(m.Layers, descriptor(MediaTypePageIndex, "x")) },
		"no state":      func(m *v1.Manifest) { m.Layers = m.Layers[1:] },
		"unknown layer": func(m *v1.Manifest) { m.Layers[2].MediaType = "application/x" },
		"digest":        func(m *v1.Manifest) { m.Layers[0].Digest = "sha256:../../etc" },
		"algorithm":     func(m *v1.Manifest) { m.Layers[3].Digest = digest.Digest("sha512:" + strings.Repeat("a", 128)) },
		"size":          func(m *v1.Manifest) { m.Layers[3].Size = -1 },
	} {
		m := manifest()
		lie(&m)
		p, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseManifest(v1.Descriptor{}, p); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseConfig(t *testing.T) {
	for in, ok := range map[string]bool{
		`{"version":"1.0"}`:            true,
		`{"version":"1.7","new":true}`: true,
		`{"version":"2.0"}`:            false,
		`{"version":""}`:               false,
		`{`:                            false,
		``:                             false,
		`{"version":"1.0","processes":[{"pid":-1}]}`: false,
	} {
		if _, err := ParseConfig([]byte(in)); (err == nil) != ok || err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", in, err)
		}
	}
	if _, err := ParseConfig(make([]byte, MaxConfigSize+1)); !errors.Is(err, ErrFormat) {
		t.Errorf("too large: %v", err)
	}
}

func FuzzParseManifest(f *testing.F) {
	p, err := json.Marshal(manifest())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p)
	f.Fuzz(func(t *testing.T, p []byte) {
		if _, err := ParseManifest(v1.Descriptor{}, p); err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("error of no class: %v", err)
		}
	})
}
