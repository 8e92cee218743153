// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// refused tries to restore and returns the one line that the start fails with.
func refused(ctx context.Context, t *testing.T, s *stack.Stack, ref string, po stack.PodOptions, o stack.ContainerOptions) string {
	t.Helper()
	po.Name, po.Handler, o.Image = "refused", "thaw", ref
	pod, err := s.RunPod(ctx, po)
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Create(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	err = c.Start(ctx)
	if err == nil {
		t.Fatal("was started")
	}
	if err := pod.Remove(ctx); err != nil {
		t.Error(err)
	}
	return err.Error()
}

// says checks that an error is one line that has all of some words.
func says(t *testing.T, got string, words ...string) {
	t.Helper()
	if strings.ContainsAny(got, "\n\r\x1b") {
		t.Errorf("not one plain line: %q", got)
	}
	for _, w := range words {
		if !strings.Contains(got, w) {
			t.Errorf("%q does not say %q", got, w)
		}
	}
}

// forged is a checkpoint image taken apart, to be changed and pushed again.
type forged struct {
	repo     name.Repository
	index    v1.Index
	manifest v1.Manifest
	config   checkpoint.Config
	at       int // the checkpoint's place in the index
}

func takeApart(ctx context.Context, t *testing.T, ref string) *forged {
	t.Helper()
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	f := &forged{repo: parsed.Context()}
	index, err := remote.Get(parsed, remote.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	decode(t, index.Manifest, &f.index)
	desc, err := checkpoint.Find(&f.index)
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range f.index.Manifests {
		if m.Digest == desc.Digest {
			f.at = i
		}
	}
	manifest, err := remote.Get(f.repo.Digest(desc.Digest.String()), remote.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	decode(t, manifest.Manifest, &f.manifest)
	layer, err := remote.Layer(f.repo.Digest(f.manifest.Config.Digest.String()), remote.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	r, err := layer.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := json.NewDecoder(r).Decode(&f.config); err != nil {
		t.Fatal(err)
	}
	return f
}

func decode(t *testing.T, p []byte, v any) {
	t.Helper()
	if err := json.Unmarshal(p, v); err != nil {
		t.Fatal(err)
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	p, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// blob pushes content and returns its descriptor.
func (f *forged) blob(ctx context.Context, t *testing.T, mediaType string, content []byte) v1.Descriptor {
	t.Helper()
	if err := remote.WriteLayer(f.repo, static.NewLayer(content, types.MediaType(mediaType)), remote.WithContext(ctx)); err != nil {
		t.Fatal(err)
	}
	return v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
}

// raw is a manifest to be pushed as it stands.
type raw struct {
	content   []byte
	mediaType string
}

func (r raw) RawManifest() ([]byte, error)        { return r.content, nil }
func (r raw) MediaType() (types.MediaType, error) { return types.MediaType(r.mediaType), nil }
func (r raw) Digest() (ggcr.Hash, error)          { return ggcr.NewHash(digest.FromBytes(r.content).String()) }
func (r raw) Size() (int64, error)                { return int64(len(r.content)), nil }

// push puts the image together again and returns its reference.
func (f *forged) push(ctx context.Context, t *testing.T, tag string) string {
	t.Helper()
	f.manifest.Config = f.blob(ctx, t, checkpoint.MediaTypeConfig, encode(t, f.config))
	m := encode(t, f.manifest)
	desc := &f.index.Manifests[f.at]
	desc.Digest, desc.Size = digest.FromBytes(m), int64(len(m))
	if err := remote.Put(f.repo.Digest(desc.Digest.String()), raw{m, v1.MediaTypeImageManifest}, remote.WithContext(ctx)); err != nil {
		t.Fatal(err)
	}
	to := f.repo.Tag(tag)
	if err := remote.Put(to, raw{encode(t, f.index), v1.MediaTypeImageIndex}, remote.WithContext(ctx)); err != nil {
		t.Fatal(err)
	}
	return to.String()
}

// layer is the manifest's layer of a media type.
func (f *forged) layer(mediaType string) *v1.Descriptor {
	for i := range f.manifest.Layers {
		if f.manifest.Layers[i].MediaType == mediaType {
			return &f.manifest.Layers[i]
		}
	}
	return nil
}

// TestRefused has a case for each kind of bad input. What remains of a case is checked by start: nothing may.
func TestRefused(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline)
	mount := filepath.Join(s.Dir, "volume")
	if err := os.MkdirAll(mount, 0o755); err != nil {
		t.Fatal(err)
	}
	volume := []*cri.Mount{{ContainerPath: "/data", HostPath: mount}}
	old, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := old.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Pipeline), Mounts: volume})
	if err != nil {
		t.Fatal(err)
	}
	before, err := logLines(ctx, old, c)
	if err != nil {
		t.Fatal(err)
	}
	ref := freeze(ctx, t, s, c)
	if err := old.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	fresh := func(t *testing.T) *forged {
		t.Helper()
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
		return takeApart(ctx, t, ref)
	}
	with := stack.ContainerOptions{Mounts: volume}

	t.Run("none of them when all is right", func(t *testing.T) {
		pod, c := restore(ctx, t, s, ref, with)
		observed(ctx, t, workloads.Pipeline, before, pod, c)
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Run("no checkpoint where one is required", func(t *testing.T) {
		says(t, refused(ctx, t, s, s.Workload(workloads.Pipeline), stack.PodOptions{}, stack.ContainerOptions{
			Annotations: map[string]string{"thaw.dev/restore": "required"},
		}), "holds no checkpoint", "thaw.dev/restore", "thaw checkpoint --push")
	})
	t.Run("unknown annotation value", func(t *testing.T) {
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{
			Mounts: volume, Annotations: map[string]string{"thaw.dev/policy": "eager"},
		}), "thaw.dev/policy", `"eager"`, "lazy, cached, complete")
	})
	t.Run("unknown format version", func(t *testing.T) {
		f := fresh(t)
		f.index.Manifests[f.at].ArtifactType = "application/vnd.thaw.checkpoint.v9"
		says(t, refused(ctx, t, s, f.push(ctx, t, "v9"), stack.PodOptions{}, with), "format version", "9", "not supported", "version 1")
	})
	t.Run("unknown version in the config", func(t *testing.T) {
		f := fresh(t)
		f.config.Version = "2.0"
		says(t, refused(ctx, t, s, f.push(ctx, t, "v2"), stack.PodOptions{}, with), "format version", "2.0", "not supported")
	})
	t.Run("wrong architecture", func(t *testing.T) {
		f := fresh(t)
		f.config.Host.Architecture = "sparc64"
		says(t, refused(ctx, t, s, f.push(ctx, t, "sparc"), stack.PodOptions{}, with), "sparc64", "node of that architecture")
	})
	t.Run("CPU features", func(t *testing.T) {
		f := fresh(t)
		f.config.Host.CPUFeatures = append(f.config.Host.CPUFeatures, "xop", "lwp")
		says(t, refused(ctx, t, s, f.push(ctx, t, "cpu"), stack.PodOptions{}, with), "processor", "lwp")
	})
	t.Run("damaged state", func(t *testing.T) {
		f := fresh(t)
		l := f.layer(checkpoint.MediaTypeState)
		*l = f.blob(ctx, t, l.MediaType, []byte("this is no zstd stream"))
		says(t, refused(ctx, t, s, f.push(ctx, t, "state"), stack.PodOptions{}, with), "invalid checkpoint image", "state")
	})
	t.Run("damaged page index", func(t *testing.T) {
		f := fresh(t)
		l := f.layer(checkpoint.MediaTypePageIndex)
		*l = f.blob(ctx, t, l.MediaType, bytes.Repeat([]byte("x"), 100))
		says(t, refused(ctx, t, s, f.push(ctx, t, "index"), stack.PodOptions{}, with), "not a page index")
	})
	t.Run("content other than its digest", func(t *testing.T) {
		f := fresh(t)
		path := s.Registry.BlobPath(f.layer(checkpoint.MediaTypeState).Digest.String())
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		bad := append([]byte(nil), good...)
		bad[len(bad)/2] ^= 1
		if err := os.WriteFile(path, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := os.WriteFile(path, good, 0o644); err != nil {
				t.Error(err)
			}
		}()
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, with), "digest")
	})
	t.Run("missing mount", func(t *testing.T) {
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{}), "/data", "mount")
	})
	t.Run("shared PID namespace", func(t *testing.T) {
		mode := cri.NamespaceMode_POD
		says(t, refused(ctx, t, s, ref, stack.PodOptions{Pid: &mode}, with), "PID namespace", "shareProcessNamespace")
	})
	t.Run("privileges", func(t *testing.T) {
		o := with
		o.Change = func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000}
			c.Linux.SecurityContext.NoNewPrivs = true
		}
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, o), "uid", "0", "1000", "no_new_privs")
	})
	t.Run("registry not reachable", func(t *testing.T) {
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
		if err := s.RestartDaemon(ctx, "[registry]\nmetadata_timeout = \"1s\"\n"); err != nil {
			t.Fatal(err)
		}
		s.Registry.Intercept(func(http.Handler) http.Handler {
			return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
		})
		defer s.Registry.Intercept(nil)
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, with), s.Registry.Addr())
	})
	t.Run("CRIU missing", func(t *testing.T) {
		if err := s.RestartDaemon(ctx, "[criu]\npath = \"/nowhere/criu\"\n"); err != nil {
			t.Fatal(err)
		}
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, with), "/nowhere/criu", "4.")
	})
	t.Run("CRIU too old", func(t *testing.T) {
		if err := s.RestartDaemon(ctx, "[criu]\nminimum_version = \"99.1\"\n"); err != nil {
			t.Fatal(err)
		}
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, with), "CRIU", "99.1")
	})
	t.Run("daemon not running", func(t *testing.T) {
		if err := s.StopDaemon(ctx); err != nil {
			t.Fatal(err)
		}
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, with), "thaw-snapshotter is not running", "systemctl start")
		if err := s.RestartDaemon(ctx, ""); err != nil {
			t.Fatal(err)
		}
	})
}
