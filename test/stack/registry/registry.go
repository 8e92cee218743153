// SPDX-License-Identifier: Apache-2.0

// Package registry is an OCI registry in the test's own process that says exactly what was asked of it.
//
// Manifests are go-containerregistry's in-memory registry. Blobs are files, served with all forms of HTTP ranges, and known
// in a repository only after a push or a mount to it, as in real registries, so that a test can tell an upload from a
// cross-repository mount. Each request is recorded with the bytes that were sent back.
package registry

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
)

// Registry is a running registry. Its methods may be called from several goroutines.
type Registry struct {
	listener net.Listener
	server   *http.Server
	serving  sync.WaitGroup
	blobs    *blobStore

	mu        sync.Mutex
	failed    error // what ended serving before Close
	requests  []*record
	intercept func(http.Handler) http.Handler
}

// Start serves a registry on address ("127.0.0.1:0" for any free port), with its blobs in dir. Close ends it.
func Start(address, dir string) (*Registry, error) {
	for _, d := range []string{"blobs", "uploads"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, fmt.Errorf("registry: %w", err)
		}
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	r := &Registry{
		listener: listener,
		blobs:    newBlobStore(dir),
	}
	quiet := log.New(io.Discard, "", 0)
	manifests := ggcr.New(ggcr.Logger(quiet), ggcr.WithReferrersSupport(true))
	r.server = &http.Server{Handler: r.handler(manifests), ErrorLog: quiet, ReadHeaderTimeout: 10 * time.Second}
	r.Serve(listener)
	return r, nil
}

// Serve serves the same registry on one more listener, which Close closes.
func (r *Registry) Serve(l net.Listener) {
	r.serving.Go(func() {
		if err := r.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.failed = errors.Join(r.failed, err)
		}
	})
}

// Close stops serving and breaks off what is being served.
func (r *Registry) Close() error {
	err := r.server.Close()
	r.serving.Wait()
	return errors.Join(err, r.failed)
}

// Addr is the host:port to put before repository names.
func (r *Registry) Addr() string { return r.listener.Addr().String() }

// Ref is the full reference of a repository and tag or digest, such as Ref("pause:1").
func (r *Registry) Ref(name string) string { return r.Addr() + "/" + name }

// Intercept puts wrap around the registry's handler, for delays, errors and damage; nil takes it away. It holds for requests
// that begin afterwards. What wrap sends is recorded like anything else.
func (r *Registry) Intercept(wrap func(http.Handler) http.Handler) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.intercept = wrap
}

// BlobPath is the file that holds a blob ("sha256:..."), for tests that damage it.
func (r *Registry) BlobPath(digest string) string { return r.blobs.path(digest) }

func (r *Registry) handler(manifests http.Handler) http.Handler {
	serve := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if t := parseTarget(req.URL.Path); t.Kind == KindBlob || t.Kind == KindUpload {
			r.blobs.serve(w, req, t)
			return
		}
		manifests.ServeHTTP(w, req)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		entry := &record{Request: Request{
			Method: req.Method, Target: parseTarget(req.URL.Path), Query: req.URL.RawQuery, Range: req.Header.Get("Range"),
		}}
		r.mu.Lock()
		r.requests = append(r.requests, entry)
		intercept := r.intercept
		r.mu.Unlock()

		handler := http.Handler(serve)
		if intercept != nil {
			handler = intercept(serve)
		}
		body := &countingBody{ReadCloser: req.Body, entry: entry}
		req.Body = body
		handler.ServeHTTP(&countingWriter{ResponseWriter: w, entry: entry}, req)
	})
}

// Kinds of a request's target.
const (
	KindBlob     = "blobs"
	KindUpload   = "uploads"
	KindManifest = "manifests"
	KindOther    = ""
)

// Target is what a request's path names.
type Target struct {
	Repository string
	Kind       string // one of the Kind constants
	Reference  string // digest, tag, or id of an upload (empty to begin one)
}

// parseTarget takes apart /v2/<repository>/<kind>/<reference>. Repositories have slashes, so it goes from the end.
func parseTarget(path string) Target {
	rest, ok := strings.CutPrefix(path, "/v2/")
	if !ok {
		return Target{}
	}
	if i := strings.LastIndex(rest, "/blobs/uploads"); i > 0 {
		return Target{rest[:i], KindUpload, strings.Trim(rest[i+len("/blobs/uploads"):], "/")}
	}
	for _, kind := range []string{KindBlob, KindManifest} {
		if i := strings.LastIndex(rest, "/"+kind+"/"); i > 0 {
			return Target{rest[:i], kind, rest[i+len(kind)+2:]}
		}
	}
	return Target{}
}
