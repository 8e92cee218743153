// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
)

func testConfig(t *testing.T) *config.Config {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	c.StateDir, c.CacheDir = filepath.Join(t.TempDir(), "s"), filepath.Join(t.TempDir(), "c")
	c.Containerd.Address = filepath.Join(t.TempDir(), "none.sock")
	c.Snapshotter.Enable = false // needs mounts
	c.Metrics.Address = l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return c
}

// run starts a daemon and returns when it is ready.
func run(t *testing.T, cfg *config.Config) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- Run(ctx, cfg, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-ended:
		cancel()
		t.Fatal(err)
	}
	return func() error {
		cancel()
		return <-ended
	}
}

// TestStateRemoved: a daemon that nobody can reach any more ends, so that it is started anew, and keeps what the next run needs.
func TestStateRemoved(t *testing.T) {
	for _, what := range []string{"", "thaw.sock", "keeper.sock", "restores"} {
		cfg := testConfig(t)
		ctx, cancel := context.WithCancel(t.Context())
		ready, ended := make(chan struct{}), make(chan error, 1)
		go func() { ended <- Run(ctx, cfg, func() { close(ready) }) }()
		<-ready
		if err := os.RemoveAll(filepath.Join(cfg.StateDir, what)); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "is gone") {
			t.Errorf("without %q: %v", what, err)
		}
		cancel()
		if err := run(t, cfg)(); err != nil {
			t.Errorf("the next run, without %q: %v", what, err)
		}
	}
}

func client(t *testing.T, cfg *config.Config) api.NodeService {
	t.Helper()
	conn, err := net.Dial("unix", cfg.Socket())
	if err != nil {
		t.Fatal(err)
	}
	c := ttrpc.NewClient(conn)
	t.Cleanup(func() { c.Close() })
	return api.NewNodeClient(c)
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	p, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s %v", url, resp.Status, err)
	}
	return string(p)
}

func TestDaemon(t *testing.T) {
	cfg := testConfig(t)
	// What a killed run leaves: sockets that nobody serves.
	if err := os.MkdirAll(cfg.StateDir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{cfg.Socket(), cfg.KeeperSocket()} {
		if err := os.WriteFile(path, nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	stop := run(t, cfg)
	for path, want := range map[string]os.FileMode{
		cfg.StateDir: os.ModeDir | 0o700, cfg.Socket(): os.ModeSocket | 0o600, cfg.KeeperSocket(): os.ModeSocket | 0o600,
		filepath.Join(cfg.CacheDir, "pages"): os.ModeDir | 0o700, filepath.Join(cfg.CacheDir, "metadata"): os.ModeDir | 0o700,
	} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v %v, want %v", path, info.Mode(), err, want)
		}
	}
	if err := Run(t.Context(), cfg, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second daemon: %v", err)
	}
	c := client(t, cfg)
	if list, err := c.List(t.Context(), &api.ListRequest{}); err != nil || len(list.Restores) != 0 {
		t.Fatalf("%+v %v", list, err)
	}
	// Errors keep their class over the wire.
	_, err := c.Fetch(t.Context(), &api.FetchRequest{RestoreId: "x/y"})
	if !errdefs.IsNotFound(errgrpc.ToNative(err)) {
		t.Errorf("got %v", err)
	}
	if _, err := c.Release(t.Context(), &api.ReleaseRequest{RestoreId: "x/y"}); err != nil {
		t.Error(err)
	}
	bundle := t.TempDir()
	p, err := json.Marshal(specs.Spec{Annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), p, 0o600); err != nil {
		t.Fatal(err)
	}
	if resp, err := c.Prepare(t.Context(), &api.PrepareRequest{Namespace: "n", ContainerId: "c", Bundle: bundle}); err != nil || resp.Restore {
		t.Errorf("%+v %v", resp, err)
	}
	if _, err := c.Prepare(t.Context(), &api.PrepareRequest{Namespace: "n", ContainerId: "c", Bundle: "relative"}); !errdefs.IsInvalidArgument(errgrpc.ToNative(err)) {
		t.Errorf("got %v", err)
	}
	base := "http://" + cfg.Metrics.Address
	if got := get(t, base+"/healthz"); got != "ok\n" {
		t.Errorf("%q", got)
	}
	metrics := get(t, base+"/metrics")
	for _, want := range []string{`thaw_restores_total{result="none"} 1`, `thaw_restores_total{result="refused"} 1`, "thaw_cache_bytes 0", "thaw_registry_requests_total 0"} {
		if !strings.Contains(metrics, want+"\n") {
			t.Errorf("no %q in the metrics", want)
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := run(t, cfg)(); err != nil {
		t.Fatalf("second run: %v", err)
	}
}

func TestCRIUCheck(t *testing.T) {
	check := func(c config.CRIU) error {
		t.Helper()
		f, err := newCRIUCheck(c)
		if err != nil {
			return err
		}
		return f.check(t.Context())
	}
	fake := func(version string) string {
		path := filepath.Join(t.TempDir(), "criu")
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho Version: "+version+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	if err := check(config.CRIU{Path: fake("99.1"), MinimumVersion: "4.1"}); err != nil {
		t.Error(err)
	}
	for want, c := range map[string]config.CRIU{
		"3.17.1":               {Path: fake("3.17.1"), MinimumVersion: "3.0"},
		"minimum_version":      {Path: fake("99.1"), MinimumVersion: "100.0"},
		"not installed":        {Path: filepath.Join(t.TempDir(), "criu"), MinimumVersion: "4.1"},
		"criu.minimum_version": {Path: "criu", MinimumVersion: "new"},
	} {
		if err := check(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	// A CRIU that is replaced is asked again.
	path := fake("3.0")
	f, err := newCRIUCheck(config.CRIU{Path: path, MinimumVersion: "4.1"})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.check(t.Context()); err == nil {
		t.Error("an old CRIU is accepted")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho Version: 99.2.1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.check(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestFailedStart: what already served when another part could not has ended when Run returns.
func TestFailedStart(t *testing.T) {
	cfg := testConfig(t)
	l, err := net.Listen("tcp", cfg.Metrics.Address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := Run(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), "metrics.address") {
		t.Errorf("got %v", err)
	}
	for _, path := range []string{cfg.Socket(), cfg.KeeperSocket()} {
		if c, err := net.Dial("unix", path); err == nil {
			c.Close()
			t.Errorf("%s is still served", path)
		}
		if c, err := net.Dial("unixpacket", path); err == nil {
			c.Close()
			t.Errorf("%s is still served", path)
		}
	}
}
