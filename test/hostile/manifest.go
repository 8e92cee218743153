// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
)

// Layers of a checkpoint manifest, by their place.
const (
	stateLayer = iota
	pageIndexLayer
	pagesLayer
)

// nothing is a digest that no registry has.
const nothing = digest.Digest("sha256:0000000000000000000000000000000000000000000000000000000000000000")

// manifestTricks lie in the checkpoint's manifest.
func manifestTricks() []Trick {
	manifest := func(change func(*v1.Manifest)) func(*Image) {
		return func(i *Image) { i.Manifest = change }
	}
	layer := func(n int, change func(*v1.Descriptor)) func(*Image) {
		return manifest(func(m *v1.Manifest) { change(&m.Layers[n]) })
	}
	raw := func(f func([]byte) []byte) func(*Image) {
		return func(i *Image) { i.RawManifest = f }
	}
	return []Trick{
		{Name: "manifest-that-is-no-json", Make: raw(func([]byte) []byte { return []byte("{") }), Says: "manifest: unexpected end of JSON input"},
		{Name: "manifest-of-other-types", Make: raw(func(p []byte) []byte {
			return bytes.Replace(p, []byte(`"layers":[`), []byte(`"layers":[7,`), 1)
		}), Says: "manifest: json: cannot unmarshal number"},
		{Name: "manifest-of-many-objects", Make: raw(func([]byte) []byte {
			return []byte(`{"layers":[` + strings.Repeat("{},", 1<<20) + `{}]}`)
		}), Says: "manifest has 1048578 objects"},
		{Name: "manifest-over-the-limit", Make: raw(func(p []byte) []byte { return append(p, bytes.Repeat([]byte(" "), 5<<20)...) }), Says: "manifest of"},
		{Name: "manifest-deeply-nested", Make: raw(func([]byte) []byte {
			return []byte(`{"annotations":` + strings.Repeat("[", 1<<20))
		}), Says: "manifest: invalid character '[' exceeded max depth"},
		{Name: "manifest-type", Make: manifest(func(m *v1.Manifest) { m.ArtifactType = "application/vnd.other" }), Says: `manifest has artifactType "application/vnd.other"`},
		{Name: "manifest-media-type", Make: manifest(func(m *v1.Manifest) { m.MediaType = v1.MediaTypeImageIndex }), Says: `manifest has media type "application/vnd.oci.image.index.v1+json"`},
		{Name: "config-media-type", Make: manifest(func(m *v1.Manifest) { m.Config.MediaType = v1.MediaTypeImageConfig }), Says: `config has media type "application/vnd.oci.image.config.v1+json"`},
		{Name: "layer-media-type", Make: layer(stateLayer, func(d *v1.Descriptor) { d.MediaType = "application/x\x1b[2J" }), Says: `layer of unknown media type "application/x\x1b[2J"`},
		{Name: "foreign-layer", Make: layer(pagesLayer, func(d *v1.Descriptor) {
			d.MediaType, d.URLs = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", []string{"http://169.254.169.254/latest"}
		}), Says: `layer of unknown media type "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"`},
		{Name: "two-states", Make: manifest(func(m *v1.Manifest) { m.Layers = append(m.Layers, m.Layers[stateLayer]) }), Says: "manifest has two state layers"},
		{Name: "two-page-indexes", Make: manifest(func(m *v1.Manifest) { m.Layers = append(m.Layers, m.Layers[pageIndexLayer]) }), Says: "manifest has two page indexes"},
		{Name: "no-state", Make: manifest(func(m *v1.Manifest) { m.Layers = m.Layers[1:] }), Says: "manifest lacks state or page index"},
		{Name: "layer-twice", Make: manifest(func(m *v1.Manifest) { m.Layers = append(m.Layers, m.Layers[pagesLayer]) }), Says: "manifest has sha256:"},
		{Name: "blob-missing", Make: manifest(func(m *v1.Manifest) { m.Layers = m.Layers[:pagesLayer] }), Says: "which is no layer of the manifest"},
		{Name: "negative-size-of-a-layer", Make: layer(stateLayer, func(d *v1.Descriptor) { d.Size = -1 }), Says: "has size -1"},
		{Name: "state-over-the-limit", Make: layer(stateLayer, func(d *v1.Descriptor) { d.Size = 1 << 62 }), Says: "limits.max_state allows"},
		{Name: "index-over-the-limit", Make: layer(pageIndexLayer, func(d *v1.Descriptor) { d.Size = 1 << 62 }), Says: "is 4611686018427387904 bytes large"},
		{Name: "blob-of-another-size", Make: layer(pagesLayer, func(d *v1.Descriptor) { d.Size++ }), Says: "the page index has"},
		{Name: "state-of-another-size", Make: layer(stateLayer, func(d *v1.Descriptor) { d.Size-- }), Says: "bytes"},
		{Name: "digest-with-a-path", Make: layer(stateLayer, func(d *v1.Descriptor) { d.Digest = "sha256:../../../../etc/passwd" }), Says: `digest "sha256:../../../../etc/passwd"`},
		{Name: "digest-of-another-algorithm", Make: layer(pagesLayer, func(d *v1.Descriptor) { d.Digest = digest.SHA512.FromString("x") }), Says: `digest "sha512:`},
		{Name: "layer-nobody-has", Make: layer(stateLayer, func(d *v1.Descriptor) { d.Digest = nothing }), Says: "404"},
		{Name: "device-annotations", Make: manifest(func(m *v1.Manifest) {
			m.Annotations["cdi.k8s.io/vendor"] = "vendor.com/device=all"
		}), Says: `manifest has annotation "cdi.k8s.io/vendor"`},
		{Name: "options-for-criu", Make: manifest(func(m *v1.Manifest) {
			m.Annotations["org.criu.config"] = "/evil.conf"
		}), Says: `manifest has annotation "org.criu.config"`},
		{Name: "annotation-with-control-characters", Make: manifest(func(m *v1.Manifest) {
			m.Annotations["a\x1b]0;owned\x07\nlevel=error msg=forged"] = ""
		}), Says: `manifest has annotation "a\x1b]0;owned\a\nlevel=error msg=forged"`},
		{Name: "label-for-containerd", Make: manifest(func(m *v1.Manifest) {
			m.Annotations["containerd.io/restart.logpath"] = "binary:///evil"
		}), Says: `manifest has annotation "containerd.io/restart.logpath"`},
	}
}

// indexTricks lie in the index that a tag names.
func indexTricks() []Trick {
	index := func(change func(*v1.Index, *v1.Descriptor)) func(*Image) {
		return func(i *Image) { i.Index = func(x *v1.Index, at int) { change(x, &x.Manifests[at]) } }
	}
	raw := func(f func([]byte) []byte) func(*Image) {
		return func(i *Image) { i.RawIndex = f }
	}
	return []Trick{
		{Name: "index-that-is-no-json", Make: raw(func([]byte) []byte { return []byte("[") }), Says: "index: unexpected end of JSON input"},
		{Name: "index-of-many-objects", Make: raw(func([]byte) []byte {
			return []byte(`{"manifests":[` + strings.Repeat("{},", 1<<20) + `{}]}`)
		}), Says: "index has 1048578 objects"},
		{Name: "two-checkpoints", Make: index(func(x *v1.Index, d *v1.Descriptor) { x.Manifests = append(x.Manifests, *d) }), Says: "the index names two checkpoints"},
		{Name: "version-of-the-future", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.ArtifactType = "application/vnd.thaw.checkpoint.v9" }), Says: `format version "9" is not supported`},
		{Name: "version-with-control-characters", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.ArtifactType = "application/vnd.thaw.checkpoint.v\x1b[2J" }), Says: `format version "\x1b[2J" is not supported`},
		{Name: "checkpoint-for-a-runtime", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.Platform = &v1.Platform{OS: "linux", Architecture: "amd64"} }), Says: `is said to run on "linux/amd64"`},
		{Name: "checkpoint-that-is-an-index", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.MediaType = v1.MediaTypeImageIndex }), Says: `the checkpoint's manifest has media type "application/vnd.oci.image.index.v1+json"`},
		{Name: "manifest-of-negative-size", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.Size = -5 }), Says: "manifest of -5 bytes"},
		{Name: "manifest-of-huge-size", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.Size = 1 << 40 }), Says: "manifest of 1099511627776 bytes"},
		{Name: "manifest-of-another-size", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.Size++ }), Says: "bytes"},
		{Name: "manifest-digest-with-a-path", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.Digest = "sha256:../../../etc/shadow" }), Says: `digest "sha256:../../../etc/shadow"`},
		{Name: "manifest-nobody-has", Make: index(func(_ *v1.Index, d *v1.Descriptor) { d.Digest = nothing }), Says: "404"},
	}
}

// configTricks lie in the checkpoint's description.
func configTricks() []Trick {
	config := func(change func(*checkpoint.Config)) func(*Image) {
		return func(i *Image) { change(&i.Config) }
	}
	raw := func(f func([]byte) []byte) func(*Image) {
		return func(i *Image) { i.RawConfig = f }
	}
	set := func(name string, value any) func([]byte) []byte {
		return func(p []byte) []byte {
			var all map[string]any
			must(json.Unmarshal(p, &all))
			all[name] = value
			out, err := json.Marshal(all)
			must(err)
			return out
		}
	}
	return []Trick{
		{Name: "config-that-is-no-json", Make: raw(func([]byte) []byte { return []byte("nothing") }), Says: "config: invalid character"},
		{Name: "config-of-many-objects", Make: raw(set("processes", make([]struct{}, 1<<19))), Says: "config has"},
		{Name: "config-over-the-limit", Make: raw(set("host", strings.Repeat("x", 5<<20))), Says: "bytes large, allowed are 4194304"},
		{Name: "config-with-a-negative-process", Make: raw(set("processes", []map[string]int{{"pid": -1}})), Says: "config: json: cannot unmarshal number -1"},
		{Name: "config-with-an-endless-number", Make: raw(func([]byte) []byte {
			return []byte(`{"version":"1.0","processes":[{"pid":` + strings.Repeat("7", 1<<20) + `}]}`)
		}), Says: "config: json: cannot unmarshal number 7777"},
		{Name: "config-with-an-endless-version", Make: config(func(c *checkpoint.Config) { c.Version = strings.Repeat("7.", 1<<20) }), Says: `format version "7.7.`},
		{Name: "config-with-an-endless-word", Make: config(func(c *checkpoint.Config) { c.Version = strings.Repeat("v", 1<<20) }), Says: `config has version "vvvv`},
		{Name: "config-version", Make: config(func(c *checkpoint.Config) { c.Version = "2.0" }), Says: `format version "2.0" is not supported`},
		{Name: "config-of-no-version", Make: config(func(c *checkpoint.Config) { c.Version = "\x1b[2Jlatest" }), Says: `config has version "\x1b[2Jlatest"`},
		{Name: "architecture", Make: config(func(c *checkpoint.Config) { c.Host.Architecture = "s390x" }), Says: `the checkpoint was made on "s390x"`},
		{Name: "page-size", Make: config(func(c *checkpoint.Config) { c.Host.PageSize = 65536 }), Says: "the checkpoint has pages of 65536 bytes"},
		{Name: "negative-page-size", Make: config(func(c *checkpoint.Config) { c.Host.PageSize = -4096 }), Says: "the checkpoint has pages of -4096 bytes"},
		{Name: "processor-that-does-not-exist", Make: config(func(c *checkpoint.Config) { c.Host.CPUFeatures = []string{"xop\x1b[2J\n", "lwp", "3dnowext"} }), Says: "this node's processor lacks 3dnowext, lwp,"},
	}
}
