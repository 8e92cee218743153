// SPDX-License-Identifier: Apache-2.0

// Package checkpoint has the words of the checkpoint image format: media types,
// annotations, and the config that describes a checkpoint. How these are
// arranged is specified in docs/image-format.md.
package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// Prefix is the prefix of every annotation and label that thaw defines.
	Prefix = "thaw.dev/"

	// Major is the version of the image format that this package reads and
	// writes. It is the number at the end of ArtifactType.
	Major = 1

	// ArtifactType is the artifactType of a checkpoint manifest.
	ArtifactType = "application/vnd.thaw.checkpoint.v1"
	// artifactFamily is what all versions of ArtifactType begin with.
	artifactFamily = "application/vnd.thaw.checkpoint.v"

	// MediaTypeConfig is the media type of a checkpoint manifest's config.
	MediaTypeConfig = "application/vnd.thaw.checkpoint.config.v1+json"
	// MediaTypeState is the layer with CRIU's images without the lazy pages.
	MediaTypeState = "application/vnd.thaw.checkpoint.state.v1.tar+zstd"
	// MediaTypePageIndex is the layer with the page index.
	MediaTypePageIndex = "application/vnd.thaw.checkpoint.pageindex.v1"
	// MediaTypePages is a layer that is a page blob.
	MediaTypePages = "application/vnd.thaw.checkpoint.pages.v1+zstd"
	// EncryptedSuffix is behind the media types of state, page index and pages that
	// are encrypted (package seal), as it is in encrypted container images.
	EncryptedSuffix = "+encrypted"

	// LabelID is a label in the runnable image's config that makes the config's
	// digest unique to the checkpoint: CRI identifies an image by that digest,
	// and two references with one config would be one image.
	LabelID = Prefix + "checkpoint-id"

	// AnnotationArtifactType on the checkpoint's descriptor in the index repeats
	// its artifactType, because tools that know OCI 1.0 only drop that field when
	// they copy an index, but keep annotations.
	AnnotationArtifactType = Prefix + "artifact-type"

	// AnnotationName is an annotation of the checkpoint manifest: the name of
	// the container that was dumped.
	AnnotationName = Prefix + "container-name"

	// SpecFile is the name in the state of the runtime spec (config.json) that
	// the container had. All other files there are CRIU's and runc's.
	SpecFile = "spec.dump"

	// MaxConfigSize bounds the config in bytes.
	MaxConfigSize = 4 << 20
	// MaxStateSize bounds the compressed state layer in bytes.
	MaxStateSize = 4 << 30
	// MaxManifestSize bounds index and manifest in bytes.
	MaxManifestSize = 4 << 20
)

// ErrNoCheckpoint means that an image holds no checkpoint: it is an ordinary
// image.
var ErrNoCheckpoint = errors.New("image holds no checkpoint")

// ErrFormat means that an image holds a checkpoint that this version cannot
// read or that contradicts itself.
var ErrFormat = errors.New("invalid checkpoint image")

// Config describes a checkpoint, for people and for the checks before a
// restore. Nothing in it is trusted to be true of the state: what grants or
// refuses a restore is read from CRIU's images themselves.
type Config struct {
	// Version is the format version, "1.0". A different major is refused.
	Version string `json:"version"`
	// Created is when the processes were frozen.
	Created time.Time `json:"created"`
	// Host describes the node that dumped.
	Host Host `json:"host"`
	// Container is what was dumped.
	Container Container `json:"container"`
	// Processes are all dumped tasks in the order of their PIDs.
	Processes []Process `json:"processes"`
	// Memory are the totals.
	Memory Memory `json:"memory"`
	// Mounts are the destinations in the container whose content came from
	// outside of it; the pod that restores must have each.
	Mounts []Mount `json:"externalMounts,omitempty"`
	// Sockets are the sockets that were listening or connected.
	Sockets []Socket `json:"sockets,omitempty"`
}

// Host describes the node that dumped.
type Host struct {
	Kernel       string   `json:"kernel"`
	Architecture string   `json:"architecture"` // as GOARCH
	CPUFeatures  []string `json:"cpuFeatures,omitempty"`
	CRIU         string   `json:"criu"`
	Runtime      string   `json:"runtime,omitempty"` // OCI runtime handler, e.g. io.containerd.runc.v2
	PageSize     int      `json:"pageSize"`
}

// Container is what was dumped.
type Container struct {
	Name      string        `json:"name,omitempty"`
	ID        string        `json:"id,omitempty"`
	BaseImage string        `json:"baseImage,omitempty"` // reference that the container was made from
	BaseID    digest.Digest `json:"baseId,omitempty"`    // digest of that image's manifest or index
	Terminal  bool          `json:"terminal,omitempty"`
	GPU       bool          `json:"gpu,omitempty"`
}

// Process is one dumped task.
type Process struct {
	PID        uint32   `json:"pid"` // in the container
	PPID       uint32   `json:"ppid"`
	Name       string   `json:"name"` // comm
	Threads    int      `json:"threads"`
	UID        uint32   `json:"uid"`
	GID        uint32   `json:"gid"`
	Caps       []string `json:"effectiveCapabilities,omitempty"`
	Seccomp    string   `json:"seccomp"` // none, strict or filter
	NoNewPrivs bool     `json:"noNewPrivs"`
}

// Memory are totals in bytes.
type Memory struct {
	Total      int64 `json:"total"`      // dumped pages, zero pages included
	Lazy       int64 `json:"lazy"`       // of them in the page index
	Eager      int64 `json:"eager"`      // of them in the state
	Zero       int64 `json:"zero"`       // of the lazy ones: all zero, stored nowhere
	Compressed int64 `json:"compressed"` // size of the page blobs made for this checkpoint
	Reused     int64 `json:"reused"`     // uncompressed bytes found in blobs of earlier checkpoints
}

// Mount is one external mount.
type Mount struct {
	Destination string `json:"destination"`
	Type        string `json:"type,omitempty"`
	ReadOnly    bool   `json:"readOnly,omitempty"`
}

// Socket is one socket.
type Socket struct {
	Protocol string `json:"protocol"` // tcp, udp, unix
	State    string `json:"state"`    // listen, established, ...
	Local    string `json:"local"`
	Remote   string `json:"remote,omitempty"`
}

// ParseConfig decodes and checks a config. Errors wrap ErrFormat.
func ParseConfig(p []byte) (*Config, error) {
	if len(p) > MaxConfigSize {
		return nil, fmt.Errorf("%w: config of %d bytes is over the limit of %d", ErrFormat, len(p), MaxConfigSize)
	}
	var c Config
	if err := decode("config", p, &c); err != nil {
		return nil, err
	}
	var major, minor int
	if _, err := fmt.Sscanf(c.Version, "%d.%d", &major, &minor); err != nil {
		return nil, fmt.Errorf("%w: config has version %.32q", ErrFormat, c.Version)
	}
	if major != Major {
		return nil, unknownVersion(c.Version)
	}
	return &c, nil
}

func unknownVersion(v string) error {
	return fmt.Errorf("%w: format version %.32q is not supported (this thaw reads version %d): use a thaw that knows it, or make the checkpoint again", ErrFormat, v, Major)
}

// maxObjects bounds the objects in JSON: two bytes are enough for one, decoded it takes
// more than a hundred. A manifest has one for each layer, of which the page index allows
// 32768, a config one for each process.
const maxObjects = 1 << 17

// decode decodes JSON of an image.
func decode(what string, p []byte, to any) error {
	if n := bytes.Count(p, []byte("{")); n > maxObjects {
		return fmt.Errorf("%w: %s has %d objects, over the limit of %d", ErrFormat, what, n, maxObjects)
	}
	if err := json.Unmarshal(p, to); err != nil {
		return fmt.Errorf("%w: %s: %.200v", ErrFormat, what, err) // it quotes numbers of any length
	}
	return nil
}

// ParseIndex decodes the index of an image. Errors wrap ErrFormat.
func ParseIndex(p []byte) (*v1.Index, error) {
	var x v1.Index
	if err := decode("index", p, &x); err != nil {
		return nil, err
	}
	return &x, nil
}

// Image is a checkpoint image's manifest, taken apart and checked.
type Image struct {
	Manifest  v1.Descriptor // of the checkpoint manifest
	Config    v1.Descriptor
	State     v1.Descriptor
	PageIndex v1.Descriptor
	Pages     []v1.Descriptor
	// Keys are the annotations with the wrapped key of an encrypted checkpoint (package
	// wrap); nil if state, page index and pages are in plain.
	Keys map[string]string
}

// Find returns the descriptor of the checkpoint manifest in an OCI index, which is
// known by its artifactType or, where that was lost, its annotation, or
// ErrNoCheckpoint. A checkpoint of another format version is ErrFormat.
func Find(index *v1.Index) (v1.Descriptor, error) {
	var found *v1.Descriptor
	for i, m := range index.Manifests {
		kind := m.ArtifactType
		if kind == "" {
			kind = m.Annotations[AnnotationArtifactType]
		}
		version, ok := strings.CutPrefix(kind, artifactFamily)
		if !ok {
			continue
		}
		if kind != ArtifactType {
			return v1.Descriptor{}, unknownVersion(version)
		}
		if found != nil {
			return v1.Descriptor{}, fmt.Errorf("%w: the index names two checkpoints", ErrFormat)
		}
		found = &index.Manifests[i]
	}
	if found == nil {
		return v1.Descriptor{}, ErrNoCheckpoint
	}
	if found.Size <= 0 || found.Size > MaxManifestSize {
		return v1.Descriptor{}, fmt.Errorf("%w: manifest of %d bytes", ErrFormat, found.Size)
	}
	if found.MediaType != v1.MediaTypeImageManifest {
		return v1.Descriptor{}, fmt.Errorf("%w: the checkpoint's manifest has media type %.64q", ErrFormat, found.MediaType)
	}
	if p := found.Platform; p != nil && p.OS != unknownPlatform {
		return v1.Descriptor{}, fmt.Errorf("%w: the checkpoint's manifest is said to run on %.32q, where a runtime would choose it", ErrFormat, p.OS+"/"+p.Architecture)
	}
	return *found, checkDigest(found.Digest)
}

// unknownPlatform keeps runtimes from choosing a manifest.
const unknownPlatform = "unknown"

func checkDigest(d digest.Digest) error {
	if err := d.Validate(); err != nil || d.Algorithm() != digest.SHA256 {
		return fmt.Errorf("%w: digest %.80q, sha256 is required", ErrFormat, d)
	}
	return nil
}

// ParseManifest takes a checkpoint manifest apart. Errors wrap ErrFormat.
func ParseManifest(desc v1.Descriptor, p []byte) (*Image, error) {
	var m v1.Manifest
	if err := decode("manifest", p, &m); err != nil {
		return nil, err
	}
	if m.MediaType != "" && m.MediaType != v1.MediaTypeImageManifest {
		return nil, fmt.Errorf("%w: manifest has media type %.64q", ErrFormat, m.MediaType)
	}
	for name := range m.Annotations {
		if !strings.HasPrefix(name, Prefix) && !strings.HasPrefix(name, "org.opencontainers.") {
			return nil, fmt.Errorf("%w: manifest has annotation %.64q, which says nothing of a checkpoint", ErrFormat, name)
		}
	}
	if m.ArtifactType != ArtifactType {
		return nil, fmt.Errorf("%w: manifest has artifactType %.64q", ErrFormat, m.ArtifactType)
	}
	img := &Image{Manifest: desc, Config: m.Config}
	if m.Config.MediaType != MediaTypeConfig {
		return nil, fmt.Errorf("%w: config has media type %.64q", ErrFormat, m.Config.MediaType)
	}
	encrypted := 0
	for _, l := range m.Layers {
		kind, ok := strings.CutSuffix(l.MediaType, EncryptedSuffix)
		if ok {
			encrypted++
		}
		switch kind {
		case MediaTypeState:
			if img.State.Digest != "" {
				return nil, fmt.Errorf("%w: manifest has two state layers", ErrFormat)
			}
			img.State = l
		case MediaTypePageIndex:
			if img.PageIndex.Digest != "" {
				return nil, fmt.Errorf("%w: manifest has two page indexes", ErrFormat)
			}
			img.PageIndex = l
		case MediaTypePages:
			img.Pages = append(img.Pages, l)
		default:
			return nil, fmt.Errorf("%w: layer of unknown media type %.64q", ErrFormat, l.MediaType)
		}
	}
	if img.State.Digest == "" || img.PageIndex.Digest == "" {
		return nil, fmt.Errorf("%w: manifest lacks state or page index", ErrFormat)
	}
	if encrypted > 0 {
		if encrypted < len(m.Layers) {
			return nil, fmt.Errorf("%w: %d of %d layers are encrypted, all or none must be", ErrFormat, encrypted, len(m.Layers))
		}
		if err := img.takeKeys(); err != nil {
			return nil, err
		}
	}
	known := make(map[digest.Digest]bool)
	for _, d := range append([]v1.Descriptor{img.Config, img.State, img.PageIndex}, img.Pages...) {
		if err := checkDigest(d.Digest); err != nil {
			return nil, err
		}
		if d.Size < 0 {
			return nil, fmt.Errorf("%w: %s has size %d", ErrFormat, d.Digest, d.Size)
		}
		if known[d.Digest] {
			return nil, fmt.Errorf("%w: manifest has %s twice", ErrFormat, d.Digest)
		}
		known[d.Digest] = true
	}
	return img, nil
}
