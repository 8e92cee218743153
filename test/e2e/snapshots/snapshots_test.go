// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package snapshots tests a node whose root filesystems come from the daemon's snapshots service: plain and eStargz images run,
// and checkpoints restore on top of both. The daemon runs as a service of systemd, restricted as its unit says.
package snapshots

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

func TestMain(m *testing.M) { stack.Main(m) }

// toEstargz pushes a copy of an image with its layers in the eStargz format and returns its reference.
func toEstargz(ctx context.Context, t *testing.T, s *stack.Stack, from string) string {
	t.Helper()
	src, err := name.ParseReference(from, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	dst, err := name.ParseReference(s.Registry.Ref("estargz/node:1"), name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(src, remote.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.RootFS.DiffIDs, config.History = nil, nil
	out, err := mutate.ConfigFile(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), config)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		if out, err = mutate.Append(out, estargzLayer(t, l)); err != nil {
			t.Fatal(err)
		}
	}
	if err := remote.Write(dst, out, remote.WithContext(ctx)); err != nil {
		t.Fatal(err)
	}
	return dst.String()
}

func estargzLayer(t *testing.T, l v1.Layer) mutate.Addendum {
	t.Helper()
	r, err := l.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	tar, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(tar), 0, int64(len(tar))), estargz.WithCompressionLevel(gzip.BestSpeed))
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	gz, err := io.ReadAll(blob)
	if err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(gz)), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		t.Fatal(err)
	}
	return mutate.Addendum{Layer: layer, MediaType: types.OCILayer, Annotations: map[string]string{
		estargz.TOCJSONDigestAnnotation: blob.TOCDigest().String(),
	}}
}

// count asks the Node.js server once and returns its counter.
func count(ctx context.Context, pod *stack.Pod) (int, error) {
	b, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/ask?key=7")
	if err != nil {
		return 0, err
	}
	var reply struct{ Count int }
	return reply.Count, json.Unmarshal(b, &reply)
}

func TestSnapshotsService(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	s, err := stack.Start(ctx, stack.Options{Snapshotter: "thaw", Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := s.StopDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	// With all that the unit takes away from it.
	unit, err := s.StartUnit(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(s.RemoveAllPods(context.Background()), unit.Stop(context.Background())); err != nil {
			t.Error(err)
		}
	}()
	if err := s.PushWorkloads(ctx, workloads.Node); err != nil {
		t.Fatal(err)
	}
	plain := s.Workload(workloads.Node)
	lazy := toEstargz(ctx, t, s, plain)

	for name, image := range map[string]string{"plain": plain, "eStargz": lazy} {
		t.Run(name, func(t *testing.T) {
			pod, err := s.RunPod(ctx, stack.PodOptions{Name: "first", Handler: "thaw"})
			if err != nil {
				t.Fatal(err)
			}
			c, err := pod.Run(ctx, stack.ContainerOptions{Image: image})
			if err != nil {
				t.Fatal(err)
			}
			for want := 1; want <= 2; want++ {
				if n, err := count(ctx, pod); err != nil || n != want {
					t.Fatalf("count %d, %v", n, err)
				}
			}
			if image == lazy {
				mounts, err := os.ReadFile("/proc/self/mounts")
				if err != nil || !strings.Contains(string(mounts), " fuse.rawBridge ") {
					t.Errorf("no layer is mounted lazily: %v", err)
				}
			}
			ref := s.Registry.Ref("checkpoints/" + strings.ToLower(name) + ":1")
			cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), "checkpoint", c.ID, "--push", ref)
			cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := pod.Remove(ctx); err != nil {
				t.Fatal(err)
			}
			again, err := s.RunPod(ctx, stack.PodOptions{Name: "again", Handler: "thaw"})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := again.Run(ctx, stack.ContainerOptions{Image: ref}); err != nil {
				t.Fatal(err)
			}
			if n, err := count(ctx, again); err != nil || n != 3 {
				t.Errorf("count %d after the restore, 3 belongs there: %v", n, err)
			}
			if err := again.Remove(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}
