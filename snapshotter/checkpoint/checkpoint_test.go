// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	_ "crypto/sha512" // a digest of another kind
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
		"media type":         {[]v1.Descriptor{other(typed, func(d *v1.Descriptor) { d.MediaType = v1.MediaTypeImageIndex })}, ErrFormat, "media type"},
		"platform":           {[]v1.Descriptor{other(typed, func(d *v1.Descriptor) { d.Platform = &v1.Platform{OS: "linux"} })}, ErrFormat, "said to run on"},
		"digest":             {[]v1.Descriptor{other(typed, func(d *v1.Descriptor) { d.Digest = digest.SHA512.FromString("x") })}, ErrFormat, "sha256 is required"},
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

func other(d v1.Descriptor, change func(*v1.Descriptor)) v1.Descriptor {
	change(&d)
	return d
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
		"layer twice":   func(m *v1.Manifest) { m.Layers = append(m.Layers, m.Layers[3]) },
		"media type":    func(m *v1.Manifest) { m.MediaType = v1.MediaTypeImageIndex },
		"annotation":    func(m *v1.Manifest) { m.Annotations = map[string]string{"cdi.k8s.io/x": "y"} },
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

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"version":"1.0","host":{"architecture":"amd64","pageSize":4096},"processes":[{"pid":1}]}`))
	f.Fuzz(func(t *testing.T, p []byte) {
		if _, err := ParseConfig(p); err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("error of no class: %v", err)
		}
	})
}

// FuzzFind: what is found in any index can be asked for.
func FuzzFind(f *testing.F) {
	f.Add([]byte(`{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.thaw.checkpoint.v1","size":7,` +
		`"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","platform":{"os":"unknown","architecture":"unknown"}}]}`))
	f.Fuzz(func(t *testing.T, p []byte) {
		x, err := ParseIndex(p)
		var d v1.Descriptor
		if err == nil {
			d, err = Find(x)
		}
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrNoCheckpoint) {
				t.Errorf("error of no class: %v", err)
			}
			return
		}
		if d.Size <= 0 || d.Size > MaxManifestSize || d.Digest.Validate() != nil {
			t.Errorf("%+v", d)
		}
	})
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
