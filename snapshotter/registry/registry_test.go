// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

const repoName = "team/app"

var content = func() []byte {
	p := make([]byte, 300<<10)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(p)
	return p
}()

var (
	dgst = digest.FromBytes(content)
	desc = v1.Descriptor{Digest: dgst, Size: int64(len(content))}
)

// middleware misbehaves in front of a real registry.
type middleware func(next http.Handler) http.Handler

// newRegistry starts a registry that holds content, behind the middleware.
func newRegistry(t *testing.T, m middleware) *httptest.Server {
	t.Helper()
	real := ggcr.New(ggcr.Logger(nopLogger()))
	put(t, real, content)
	var h http.Handler = ranged{real}
	if m != nil {
		h = m(h)
	}
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv
}

func put(t *testing.T, h http.Handler, p []byte) {
	t.Helper()
	rec := httptest.NewRecorder()
	req := httptest.NewRequest(http.MethodPost, "/v2/"+repoName+"/blobs/uploads/?digest="+digest.FromBytes(p).String(), bytes.NewReader(p))
	h.ServeHTTP(rec, req)
	if rec.Code != http.StatusCreated {
		t.Fatalf("upload: %d %s", rec.Code, rec.Body)
	}
}

// ranged serves blobs with ranges whatever the registry below can do.
type ranged struct{ next http.Handler }

func (h ranged) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !strings.Contains(r.URL.Path, "/blobs/") || r.Method != http.MethodGet {
		h.next.ServeHTTP(w, r)
		return
	}
	plain := r.Clone(r.Context())
	plain.Header.Del("Range")
	rec := httptest.NewRecorder()
	h.next.ServeHTTP(rec, plain)
	if rec.Code != http.StatusOK {
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes())
		return
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(rec.Body.Bytes()))
}

func newClient(hosts docker.RegistryHosts, timeout time.Duration) *Client {
	return New(Options{Hosts: hosts, Timeout: timeout, StallTimeout: min(timeout/4, 500*time.Millisecond), Backoff: time.Millisecond})
}

// open gives what passes time to pass.
func open(t *testing.T, hosts docker.RegistryHosts, host string) *Repository {
	t.Helper()
	return openFor(t, hosts, host, 20*time.Second)
}

// openBriefly is for what does not pass.
func openBriefly(t *testing.T, hosts docker.RegistryHosts, host string) *Repository {
	t.Helper()
	return openFor(t, hosts, host, time.Second)
}

func openFor(t *testing.T, hosts docker.RegistryHosts, host string, timeout time.Duration) *Repository {
	t.Helper()
	r, err := newClient(hosts, timeout).Repository(host + "/" + repoName + ":tag")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func address(srv *httptest.Server) string { return srv.Listener.Addr().String() }

func plainHosts(t *testing.T) docker.RegistryHosts {
	return Hosts(t.Context(), HostOptions{Connections: 4})
}

func readRange(ctx context.Context, r *Repository, off, n int64) ([]byte, error) {
	rd, err := r.Open(ctx, Range{Digest: dgst, Size: desc.Size, Offset: off, Length: n})
	if err != nil {
		return nil, err
	}
	defer rd.Close()
	return io.ReadAll(rd)
}

// once misbehaves for the first n requests for the blob's data.
func once(n int32, bad http.HandlerFunc) middleware {
	var left atomic.Int32
	left.Store(n)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/blobs/") && left.Add(-1) >= 0 {
				bad(w, r)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

func partial(header string, p []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Range", header)
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(p)
	}
}

// TestMalformed has answers that no registry gives. Each ends a fetch when it comes
// again.
func TestMalformed(t *testing.T) {
	const off, n = 100_000, 50_000
	whole := fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, len(content))
	for name, tc := range map[string]struct {
		bad  http.HandlerFunc
		is   func(error) bool
		want string
	}{
		"beyond range":   {partial(fmt.Sprintf("bytes %d-%d/%d", off, off+n, len(content)), content[off:off+n+1]), errdefs.IsDataLoss, "instead of"},
		"other size":     {partial(fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, len(content)+1), content[off:off+n]), errdefs.IsDataLoss, "in all instead of"},
		"no range":       {partial("", content[off:off+n]), errdefs.IsDataLoss, "without a valid Content-Range"},
		"negative range": {partial("bytes -5-10/20", content[off:off+n]), errdefs.IsDataLoss, "without a valid Content-Range"},
		"length": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "7")
			partial(whole, content[:7])(w, nil)
		}, errdefs.IsDataLoss, "7 bytes for a range of 50000"},
		"multipart": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "multipart/byteranges; boundary=x")
			w.WriteHeader(206)
		}, errdefs.IsDataLoss, "several ranges"},
		"encoded": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			partial(whole, content[off:off+n])(w, nil)
		}, errdefs.IsDataLoss, "encoding"},
		"error code": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(403)
			_, _ = w.Write([]byte(`{"errors":[{"code":"DENIED","message":"no \u001b[31m"}]}`))
		}, errdefs.IsPermissionDenied, "(DENIED)"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := newRegistry(t, once(1<<30, tc.bad))
			_, err := readRange(t.Context(), open(t, plainHosts(t), address(srv)), off, n)
			if err == nil || !tc.is(err) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), address(srv)) {
				t.Fatalf("got %v, want a classed error with %q and the host", err, tc.want)
			}
			if strings.ContainsAny(err.Error(), "\n\x1b") || strings.Contains(err.Error(), "http://") {
				t.Fatalf("not one clean line without URLs: %q", err)
			}
		})
	}
}

func TestWhole(t *testing.T) {
	srv := newRegistry(t, nil)
	r := open(t, plainHosts(t), address(srv))
	p, err := r.Blob(t.Context(), desc, 1<<20)
	if err != nil || !bytes.Equal(p, content) {
		t.Fatalf("%v", err)
	}
	if _, err := r.Blob(t.Context(), desc, 1000); !errdefs.IsResourceExhausted(err) {
		t.Fatalf("limit: %v", err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := r.CopyBlob(t.Context(), desc, f); err != nil {
		t.Fatal(err)
	}
	if p, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(p, content) {
		t.Fatalf("file: %v", err)
	}
	wrongSize := desc
	wrongSize.Size++
	if _, err := r.Blob(t.Context(), wrongSize, 1<<20); !errdefs.IsDataLoss(err) {
		t.Fatalf("size: %v", err)
	}
}

// certs writes certs.d/HOST/hosts.toml.
func certs(t *testing.T, host, text string) string {
	t.Helper()
	dir := t.TempDir()
	name := strings.Replace(host, ":", "_", 1) + "_"
	if !strings.Contains(host, ":") {
		name = host
	}
	if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name, "hosts.toml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestMirrors: mirrors of hosts.toml are asked first, with the registry's name;
// what a mirror cannot deliver comes from the registry.
func TestMirrors(t *testing.T) {
	var ns atomic.Value
	for name, bad := range map[string]http.HandlerFunc{
		"good mirror":     nil,
		"without content": status(404),
		"forbidden":       status(403),
		"failing":         status(500),
	} {
		t.Run(name, func(t *testing.T) {
			origin := newRegistry(t, nil)
			mirror := newRegistry(t, func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					ns.Store(r.URL.Query().Get("ns"))
					if bad != nil {
						bad(w, r)
						return
					}
					next.ServeHTTP(w, r)
				})
			})
			dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n[host.%q]\n", origin.URL, mirror.URL))
			r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
			got, err := readRange(t.Context(), r, 7, 7)
			if err != nil || !bytes.Equal(got, content[7:14]) {
				t.Fatalf("%v", err)
			}
			if ns.Load() != "registry.test" {
				t.Errorf("mirror was told ns=%v", ns.Load())
			}
		})
	}
	t.Run("damaged", func(t *testing.T) {
		origin := newRegistry(t, nil)
		mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, len(content))) }))
		defer mirror.Close()
		dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n[host.%q]\n", origin.URL, mirror.URL))
		r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
		if _, err := r.Blob(t.Context(), desc, 1<<20); err != nil {
			t.Fatalf("not fetched from elsewhere: %v", err)
		}
		rd, err := r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Offset: 0, Length: 9, Avoid: address(mirror)})
		if err != nil {
			t.Fatal(err)
		}
		defer rd.Close()
		if rd.Host() != address(origin) {
			t.Fatalf("avoided host was asked: %s", rd.Host())
		}
	})
}

func TestUnreachable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	c := New(Options{Hosts: plainHosts(t), Timeout: 50 * time.Millisecond, StallTimeout: time.Second, Backoff: time.Millisecond})
	r, err := c.Repository(l.Addr().String() + "/a/b:c")
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Blob(t.Context(), desc, 1<<20)
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "refused") || !strings.Contains(err.Error(), "check that the registry runs") {
		t.Fatalf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Blob(ctx, desc, 1<<20); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
}

// TestConnectionsAreReused counts the connections of many reads.
func TestConnectionsAreReused(t *testing.T) {
	var conns atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	defer srv.Close()
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n", srv.URL))
	r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
	for i := range 20 {
		if _, err := readRange(t.Context(), r, int64(i)*1000, 1000); err != nil {
			t.Fatal(err)
		}
	}
	if n := conns.Load(); n != 1 {
		t.Fatalf("%d connections for reads one after the other", n)
	}
}

func TestReferences(t *testing.T) {
	c := newClient(plainHosts(t), time.Second)
	for _, ref := range []string{"", "app:tag", "host.test", "host.test/", "http://host.test/a:b"} {
		if _, err := c.Repository(ref); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", ref, err)
		}
	}
}

func FuzzContentRange(f *testing.F) {
	f.Add("bytes 0-9/10")
	f.Add("bytes 5-*/x")
	f.Fuzz(func(t *testing.T, s string) {
		a, b, n, ok := parseContentRange(s)
		if ok && (a < 0 || b < 0 || n < -1) {
			t.Fatalf("%q: %d %d %d", s, a, b, n)
		}
		_ = parseRetryAfter(s)
	})
}

func nopLogger() *log.Logger { return log.New(io.Discard, "", 0) }
