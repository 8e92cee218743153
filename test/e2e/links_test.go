// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// link puts a symbolic link into the root filesystem of the runnable image.
func (f *forged) link(ctx context.Context, t *testing.T, name, target string) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }
	layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		t.Fatal(err)
	}
	runnable := &f.index.Manifests[1-f.at]
	image, err := remote.Image(f.repo.Digest(runnable.Digest.String()), remote.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	if image, err = mutate.AppendLayers(image, layer); err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(f.repo.Tag("rootfs"), image, remote.WithContext(ctx)); err != nil {
		t.Fatal(err)
	}
	m, err := image.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	runnable.Digest, runnable.Size = digest.FromBytes(m), int64(len(m))
}

// TestVolumesOfOthers: CRIU is root and would open files and bind sockets in volumes where the pod's user may not.
func TestVolumesOfOthers(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline)
	volume := func(name string, mode os.FileMode) []*cri.Mount {
		dir, err := os.MkdirTemp(s.Dir, name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		return []*cri.Mount{{ContainerPath: "/data", HostPath: dir}}
	}
	own, closed := volume("own", 0o777), volume("closed", 0o755)
	if err := os.WriteFile(filepath.Join(closed[0].HostPath, "pipeline.sh"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	user := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1000} }
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	run := func(name, program string) *stack.Container {
		program = "open('/tmp/" + name + "', 'w')\n" + program // each has a layer of its own
		c, err := pod.Run(ctx, stack.ContainerOptions{
			Image: s.Workload(workloads.Pipeline), Mounts: own, Change: user, Name: name,
			Command: []string{"/usr/bin/python3", "-uc", program},
		})
		if err != nil {
			t.Fatal(err)
		}
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for { // until it says that it has what it opens
			if text, err := c.Log(); err == nil && strings.Contains(text, "ready") {
				return c
			}
			select {
			case <-pace.C:
			case <-ctx.Done():
				t.Fatal(ctx.Err())
			}
		}
	}
	file := run("file", "file = open('/app/pipeline.sh'); print('ready')\nimport time\nwhile True: time.sleep(1)")
	sock := run("sock", "sock = __import__('socket'); s = sock.socket(sock.AF_UNIX); s.bind('/data/s'); s.listen(); print('ready')\nwhile True: s.accept()")
	fileRef, sockRef := freeze(ctx, t, s, file), freeze(ctx, t, s, sock)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}

	t.Run("a socket of its own", func(t *testing.T) {
		pod, c := restore(ctx, t, s, sockRef, stack.ContainerOptions{Mounts: own, Change: user})
		if _, err := c.Exec(ctx, "/usr/bin/python3", "-c", "import socket; socket.socket(socket.AF_UNIX).connect('/data/s')"); err != nil {
			t.Error(err)
		}
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Run("a socket where it may not", func(t *testing.T) {
		says(t, refused(ctx, t, s, sockRef, stack.PodOptions{}, stack.ContainerOptions{Mounts: closed, Change: user}),
			"unix socket", "/data/s", "may not bind it")
	})
	t.Run("a file without links", func(t *testing.T) {
		pod, _ := restore(ctx, t, s, fileRef, stack.ContainerOptions{Mounts: own, Change: user})
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Run("a link into a volume", func(t *testing.T) {
		f := takeApart(ctx, t, fileRef)
		f.link(ctx, t, "app", "/data")
		says(t, refused(ctx, t, s, f.push(ctx, t, "link"), stack.PodOptions{}, stack.ContainerOptions{Mounts: closed, Change: user}),
			"restore of", "/app/pipeline.sh, a link to /data/pipeline.sh", "may not open it")
	})
}
