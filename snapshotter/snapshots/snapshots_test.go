// SPDX-License-Identifier: Apache-2.0

package snapshots

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/errdefs"
	"github.com/containerd/stargz-snapshotter/estargz"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"thaw.dev/thaw/snapshotter/registry"
)

// serve runs the service and returns a client of it.
func serve(t *testing.T, hosts docker.RegistryHosts) snapshots.Snapshotter {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	root := t.TempDir()
	s, err := New(t.Context(), root, hosts)
	if err != nil {
		t.Skipf("snapshots cannot be kept here: %v", err)
	}
	path := filepath.Join(t.TempDir(), "s.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(root))
		if err != nil || len(left) != 0 {
			t.Errorf("mounts left: %v %v", left, err)
		}
	})
	return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), "thaw")
}

func mounted(t *testing.T, mounts []mount.Mount, f func(dir string)) {
	t.Helper()
	if err := mount.WithTempMount(t.Context(), mounts, func(dir string) error {
		f(dir)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestPlain: an ordinary layer is unpacked by who asks, committed, and is the
// parent of a writable one.
func TestPlain(t *testing.T) {
	s := serve(t, func(string) ([]docker.RegistryHost, error) { return nil, nil })
	mounts, err := s.Prepare(t.Context(), "extract-1", "")
	if err != nil {
		t.Fatal(err)
	}
	mounted(t, mounts, func(dir string) {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("a container's user could not enter its root: %v %v", info.Mode(), err)
		}
		if err := os.WriteFile(filepath.Join(dir, "base"), []byte("base"), 0o644); err != nil {
			t.Fatal(err)
		}
	})
	if err := s.Commit(t.Context(), "layer-1", "extract-1"); err != nil {
		t.Fatal(err)
	}
	if mounts, err = s.Prepare(t.Context(), "container", "layer-1"); err != nil {
		t.Fatal(err)
	}
	mounted(t, mounts, func(dir string) {
		if p, err := os.ReadFile(filepath.Join(dir, "base")); err != nil || string(p) != "base" {
			t.Fatalf("%q %v", p, err)
		}
	})
	for _, key := range []string{"container", "layer-1"} {
		if err := s.Remove(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLazy: a layer in the eStargz format is mounted without being pulled.
func TestLazy(t *testing.T) {
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("FUSE is needed")
	}
	var raw bytes.Buffer
	w := tar.NewWriter(&raw)
	content := bytes.Repeat([]byte("lazy "), 1000)
	for _, h := range []*tar.Header{
		{Typeflag: tar.TypeDir, Name: "etc/", Mode: 0o755},
		{Typeflag: tar.TypeReg, Name: "etc/file", Mode: 0o644, Size: int64(len(content))},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write(content); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(raw.Bytes()), 0, int64(raw.Len())))
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	layer, err := io.ReadAll(blob)
	if err != nil {
		t.Fatal(err)
	}
	d := digest.FromBytes(layer)
	reg := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(reg)
	defer srv.Close()
	resp, err := http.Post(srv.URL+"/v2/app/blobs/uploads/?digest="+d.String(), "application/octet-stream", bytes.NewReader(layer))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		t.Fatal(resp.Status)
	}
	host := srv.Listener.Addr().String()
	s := serve(t, registry.Hosts(t.Context(), registry.HostOptions{}))
	labels := snapshots.WithLabels(map[string]string{
		"containerd.io/snapshot.ref":              "chain-1",
		"containerd.io/snapshot/cri.image-ref":    host + "/app:v1",
		"containerd.io/snapshot/cri.layer-digest": d.String(),
		"containerd.io/snapshot/cri.image-layers": d.String(),
		estargz.TOCJSONDigestAnnotation:           blob.TOCDigest().String(),
	})
	if _, err := s.Prepare(t.Context(), "extract-1", "", labels); !errdefs.IsAlreadyExists(err) {
		t.Fatalf("the layer was not mounted: %v", err)
	}
	mounts, err := s.Prepare(t.Context(), "container", "chain-1")
	if err != nil {
		t.Fatal(err)
	}
	mounted(t, mounts, func(dir string) {
		if p, err := os.ReadFile(filepath.Join(dir, "etc", "file")); err != nil || !bytes.Equal(p, content) {
			t.Fatalf("%d bytes, %v", len(p), err)
		}
	})
	if err := errors.Join(s.Remove(t.Context(), "container"), s.Remove(t.Context(), "chain-1")); err != nil {
		t.Fatal(err)
	}
}
