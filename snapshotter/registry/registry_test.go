// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"encoding/base64"
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
	"strconv"
	"strings"
	"sync"
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

func newClient(hosts docker.RegistryHosts) *Client {
	return New(Options{Hosts: hosts, Timeout: 2 * time.Second, StallTimeout: 200 * time.Millisecond, Backoff: time.Millisecond})
}

func open(t *testing.T, hosts docker.RegistryHosts, host string) *Repository {
	t.Helper()
	r, err := newClient(hosts).Repository(host + "/" + repoName + ":tag")
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

// cut sends half of what was asked for and breaks the connection.
func cut(w http.ResponseWriter, r *http.Request) {
	var a, b int
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &a, &b); err != nil {
		panic(err)
	}
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b, len(content)))
	w.Header().Set("Content-Length", strconv.Itoa(b-a+1))
	w.WriteHeader(http.StatusPartialContent)
	_, _ = w.Write(content[a : a+(b-a+1)/2])
	panic(http.ErrAbortHandler)
}

func partial(header string, p []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Range", header)
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(p)
	}
}

// TestRiddenOut has one case for each fault that a fetch must survive.
func TestRiddenOut(t *testing.T) {
	const off, n = 100_000, 50_000
	for name, bad := range map[string]http.HandlerFunc{
		"500":               status(500),
		"502":               status(502),
		"503":               status(503),
		"429":               status(429),
		"429 retry after":   func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Retry-After", "0"); w.WriteHeader(429) },
		"408":               status(408),
		"connection reset":  func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"truncated body":    cut,
		"stall before data": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"stall in data": func(w http.ResponseWriter, r *http.Request) {
			var a, b int
			if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &a, &b); err != nil {
				panic(err)
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b, len(content)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(content[a : a+10])
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			srv := newRegistry(t, once(2, bad))
			got, err := readRange(t.Context(), open(t, plainHosts(t), address(srv)), off, n)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, content[off:off+n]) {
				t.Fatal("wrong bytes")
			}
		})
	}
}

// TestTruncatedGoesOn proves that bytes which arrived are not asked for again.
func TestTruncatedGoesOn(t *testing.T) {
	srv := newRegistry(t, once(1, cut))
	r := open(t, plainHosts(t), address(srv))
	if _, err := readRange(t.Context(), r, 10, 1000); err != nil {
		t.Fatal(err)
	}
	if got := r.Stats(); got.Bytes != 1000 || got.Requests != 2 {
		t.Fatalf("%+v", got)
	}
}

// TestRefused has one case for each fault that ends a fetch at once, or at its
// timeout, with a named error of a class.
func TestRefused(t *testing.T) {
	const off, n = 100_000, 50_000
	whole := fmt.Sprintf("bytes %d-%d/%d", off, off+n-1, len(content))
	for name, tc := range map[string]struct {
		bad  http.HandlerFunc
		is   func(error) bool
		want string
	}{
		"401":            {status(401), errdefs.IsUnauthorized, "HTTP status 401 Unauthorized"},
		"403":            {status(403), errdefs.IsPermissionDenied, "HTTP status 403 Forbidden"},
		"404":            {status(404), errdefs.IsNotFound, "push the checkpoint image again"},
		"416":            {status(416), errdefs.IsDataLoss, "shorter"},
		"418":            {status(418), errdefs.IsUnknown, "418"},
		"other range":    {partial(fmt.Sprintf("bytes 0-%d/%d", n-1, len(content)), content[:n]), errdefs.IsDataLoss, "bytes 0-49999 instead of 100000-149999"},
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
		"redirect loop": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) }, errdefs.IsDataLoss, "redirect"},
		"redirect to file": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "file:///etc/passwd")
			w.WriteHeader(307)
		}, errdefs.IsDataLoss, "redirect"},
		"error code": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(403)
			_, _ = w.Write([]byte(`{"errors":[{"code":"DENIED","message":"no \u001b[31m"}]}`))
		}, errdefs.IsPermissionDenied, "(DENIED)"},
		"retry after too long": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(429)
		}, errdefs.IsResourceExhausted, "429"},
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

// TestNoRanges: a registry without ranges is tolerated near the beginning of a
// blob and refused where too much would be thrown away.
func TestNoRanges(t *testing.T) {
	srv := newRegistry(t, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.Header.Del("Range")
			next.ServeHTTP(w, r)
		})
	})
	r := open(t, plainHosts(t), address(srv))
	got, err := readRange(t.Context(), r, 5000, 70)
	if err != nil || !bytes.Equal(got, content[5000:5070]) {
		t.Fatalf("%v", err)
	}
	const size = maxSkip * 4
	big := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(size))
		w.WriteHeader(200)
	}))
	defer big.Close()
	_, err = open(t, plainHosts(t), address(big)).Open(t.Context(), Range{Digest: dgst, Size: size, Offset: maxSkip + 1, Length: 10})
	if !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), "ranges") {
		t.Fatalf("got %v", err)
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

// TestWrongBytes: damaged content is fetched once more and then refused.
func TestWrongBytes(t *testing.T) {
	damage := func(w http.ResponseWriter, _ *http.Request) {
		bad := bytes.Clone(content)
		bad[17] ^= 1
		_, _ = w.Write(bad)
	}
	srv := newRegistry(t, once(1, damage))
	p, err := open(t, plainHosts(t), address(srv)).Blob(t.Context(), desc, 1<<20)
	if err != nil || !bytes.Equal(p, content) {
		t.Fatalf("damaged once: %v", err)
	}
	srv = newRegistry(t, once(2, damage))
	if _, err = open(t, plainHosts(t), address(srv)).Blob(t.Context(), desc, 1<<20); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), "digest") {
		t.Fatalf("damaged twice: %v", err)
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
	t.Run("down", func(t *testing.T) {
		origin := newRegistry(t, nil)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n[host.\"http://%s\"]\n", origin.URL, l.Addr()))
		r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
		if _, err := readRange(t.Context(), r, 7, 7); err != nil {
			t.Fatal(err)
		}
	})
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

// TestRedirects: the storage is asked directly as long as its URL works, gets no
// credentials, and is found anew when the URL has expired.
func TestRedirects(t *testing.T) {
	var asked, served, leaked, expired atomic.Int32
	storage := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" || r.Header.Get("X-Node") != "" {
			leaked.Add(1)
		}
		if r.URL.Query().Get("generation") != fmt.Sprint(expired.Load()) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		served.Add(1)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	defer storage.Close()
	srv := newRegistry(t, func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, ok := r.BasicAuth(); !ok || u != "me" || p != "secret" {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			asked.Add(1)
			http.Redirect(w, r, storage.URL+"/data?signature=hush&generation="+fmt.Sprint(expired.Load()), http.StatusTemporaryRedirect)
		})
	})
	auth := filepath.Join(t.TempDir(), "auth.json")
	cred := base64.StdEncoding.EncodeToString([]byte("me:secret"))
	if err := os.WriteFile(auth, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, address(srv), cred), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := certs(t, address(srv), fmt.Sprintf("server = %q\n[host.%q]\n[host.%q.header]\nx-node=\"1\"\n", srv.URL, srv.URL, srv.URL))
	r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir, DockerConfig: auth}), address(srv))
	for i := range 5 {
		if _, err := readRange(t.Context(), r, int64(i), 10); err != nil {
			t.Fatal(err)
		}
	}
	if asked.Load() != 1 || served.Load() != 5 {
		t.Fatalf("registry asked %d times, storage %d", asked.Load(), served.Load())
	}
	expired.Add(1)
	if _, err := readRange(t.Context(), r, 1, 10); err != nil {
		t.Fatalf("expired URL: %v", err)
	}
	if asked.Load() != 2 || leaked.Load() != 0 {
		t.Fatalf("registry asked %d times, credentials leaked %d times", asked.Load(), leaked.Load())
	}
	storage.Close()
	_, err := readRange(t.Context(), r, 1, 10)
	if err == nil || strings.Contains(err.Error(), "hush") {
		t.Fatalf("error leaks the signature: %v", err)
	}
}

// TestTokens: bearer tokens are fetched for the repository and renewed when the
// registry refuses them, whether it says why or not.
func TestTokens(t *testing.T) {
	for _, challenge := range []string{"", `,error="invalid_token"`} {
		t.Run("challenge"+challenge, func(t *testing.T) {
			var mu sync.Mutex
			valid, issued := "token-0", 0
			var scope string
			var srv *httptest.Server
			srv = newRegistry(t, func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					mu.Lock()
					defer mu.Unlock()
					if r.URL.Path == "/token" {
						scope = r.URL.Query().Get("scope")
						issued++
						fmt.Fprintf(w, `{"token":%q,"expires_in":300}`, valid)
						return
					}
					if r.Header.Get("Authorization") != "Bearer "+valid {
						w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="s",scope="repository:%s:pull"%s`, srv.URL, repoName, challenge))
						w.WriteHeader(http.StatusUnauthorized)
						return
					}
					next.ServeHTTP(w, r)
				})
			})
			r := open(t, plainHosts(t), address(srv))
			for i := range 3 {
				if _, err := readRange(t.Context(), r, 0, 10); err != nil {
					t.Fatalf("read %d: %v", i, err)
				}
			}
			mu.Lock()
			if issued != 1 || scope != "repository:"+repoName+":pull" {
				t.Errorf("%d tokens for scope %q", issued, scope)
			}
			valid = "token-1" // the first one is not accepted any more
			mu.Unlock()
			if _, err := readRange(t.Context(), r, 0, 10); err != nil {
				t.Fatalf("after expiry: %v", err)
			}
		})
	}
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

func TestUntrustedTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.NotFoundHandler())
	defer srv.Close()
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n", srv.URL))
	r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
	_, err := r.Blob(t.Context(), desc, 1<<20)
	if err == nil || !strings.Contains(err.Error(), "CA to hosts.toml") {
		t.Fatalf("got %v", err)
	}
	if r.Stats().Requests != 1 {
		t.Fatalf("%d requests: what will not change was tried again", r.Stats().Requests)
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
	c := newClient(plainHosts(t))
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
