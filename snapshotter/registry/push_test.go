// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// hostsToml writes certs.d/HOST/hosts.toml and returns certs.d.
func hostsToml(t *testing.T, host, content string) string {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, host)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return root
}

func upload(t *testing.T, certs, repository string) error {
	t.Helper()
	repo, err := name.NewRepository(repository)
	if err != nil {
		t.Fatal(err)
	}
	layer := static.NewLayer([]byte("hello"), types.OCILayer)
	return remote.WriteLayer(repo, layer, remote.WithTransport(NewPushTransport(context.Background(), certs)))
}

// A registry behind a made-up name, a path prefix and plain http.
func TestPushFollowsHostsToml(t *testing.T) {
	blobs := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	var header string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header = r.Header.Get("X-Team")
		rest, ok := strings.CutPrefix(r.URL.Path, "/mirror/v2")
		if !ok {
			http.NotFound(w, r)
			return
		}
		r.URL.Path = "/v2" + rest
		blobs.ServeHTTP(&prefixed{w}, r)
	}))
	defer srv.Close()
	certs := hostsToml(t, "images.example", fmt.Sprintf(`
[host."http://127.0.0.1:1/v2"]
  capabilities = ["pull"]
[host."%s/mirror"]
  capabilities = ["pull", "resolve", "push"]
  [host."%s/mirror".header]
    X-Team = "blue"
`, srv.URL, srv.URL))
	if err := upload(t, certs, "images.example/app/web"); err != nil {
		t.Fatal(err)
	}
	if header != "blue" {
		t.Errorf("header %q", header)
	}
}

// prefixed puts the path prefix into the locations that the registry answers.
type prefixed struct{ http.ResponseWriter }

func (p *prefixed) WriteHeader(code int) {
	if l := p.Header().Get("Location"); l != "" {
		p.Header().Set("Location", "/mirror"+l)
	}
	p.ResponseWriter.WriteHeader(code)
}

func TestPushWithCA(t *testing.T) {
	srv := httptest.NewTLSServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	if err := upload(t, hostsToml(t, "images.example", fmt.Sprintf("server = %q\n", srv.URL)), "images.example/app"); err == nil {
		t.Error("an unknown certificate was accepted")
	}
	if err := upload(t, hostsToml(t, "images.example", fmt.Sprintf("server = %q\nskip_verify = true\n", srv.URL)), "images.example/app"); err != nil {
		t.Error(err)
	}
}

func TestPushWithoutConfiguration(t *testing.T) {
	srv := httptest.NewServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	if err := upload(t, "", strings.TrimPrefix(srv.URL, "http://")+"/app"); err != nil {
		t.Error(err)
	}
}

func TestPushNotAllowed(t *testing.T) {
	certs := hostsToml(t, "images.example", `
server = "http://127.0.0.1:1"
capabilities = ["pull"]
`)
	if err := upload(t, certs, "images.example/app"); !errors.Is(err, ErrNoPush) {
		t.Errorf("got %v", err)
	}
}

func TestPullPassesOverMirrors(t *testing.T) {
	full, empty := httptest.NewServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))), httptest.NewServer(ggcr.New())
	defer full.Close()
	defer empty.Close()
	certs := hostsToml(t, "images.example", fmt.Sprintf(`
server = %q
[host."http://127.0.0.1:1"]
  capabilities = ["pull"]
[host.%q]
  capabilities = ["pull"]
`, full.URL, empty.URL))
	if err := upload(t, certs, "images.example/app"); err != nil {
		t.Fatal(err)
	}
	d, err := static.NewLayer([]byte("hello"), types.OCILayer).Digest()
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.NewDigest("images.example/app@" + d.String())
	if err != nil {
		t.Fatal(err)
	}
	l, err := remote.Layer(ref, remote.WithTransport(NewPullTransport(context.Background(), certs)))
	if err != nil {
		t.Fatal(err)
	}
	rc, err := l.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	if p, err := io.ReadAll(rc); err != nil || string(p) != "hello" {
		t.Errorf("%q, %v", p, err)
	}
}
