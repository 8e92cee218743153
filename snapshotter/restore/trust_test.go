// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/snapshotter/policy"
)

// trust gives the node a policy, and pushes a sample.
func (n *node) trust(o policy.Options) *sample {
	n.t.Helper()
	p, err := policy.New(o)
	if err != nil {
		n.t.Fatal(err)
	}
	n.stop()
	n.opts.Trust = p
	n.start()
	s := newSample(n.t)
	n.push(s)
	return s
}

func verifier(t *testing.T, script string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "verifier"), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// nothingLeft checks that a refused restore holds nothing.
func (n *node) nothingLeft() {
	n.t.Helper()
	n.manager.mu.Lock()
	defer n.manager.mu.Unlock()
	if len(n.manager.restores) != 0 || len(n.manager.repos) != 0 {
		n.t.Errorf("%d restores and %d repositories are left", len(n.manager.restores), len(n.manager.repos))
	}
	if records, err := os.ReadDir(n.manager.RecordDir()); err != nil || len(records) != 0 {
		n.t.Errorf("records %v, %v", records, err)
	}
}

func named(format string, args ...any) func(*specs.Spec) {
	return func(s *specs.Spec) { s.Annotations[criImageName] = fmt.Sprintf(format, args...) }
}

func TestTrustedRepositories(t *testing.T) {
	n := newNode(t)
	s := n.trust(policy.Options{Repositories: []string{"registry.test/other/*"}})
	_, err := n.prepare("c", nil)
	if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "trust.repositories") || !strings.Contains(err.Error(), string(s.indexDesc.Digest)) {
		t.Errorf("got %v", err)
	}
	if got := n.requests.Load(); got != 0 {
		t.Errorf("%d requests to a registry that is not trusted", got)
	}
	n.nothingLeft()
	n.trust(policy.Options{Repositories: []string{"registry.test/team/app"}})
	if _, err := n.prepare("c", nil); err != nil {
		t.Error(err)
	}
}

// TestPinned: names with a digest are those of containerd's image store, and the digest is compared with what is restored.
func TestPinned(t *testing.T) {
	n := newNode(t)
	s := n.trust(policy.Options{RequireDigest: true})
	_, err := n.prepare("c", nil)
	if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "trust.require_digest") {
		t.Errorf("got %v", err)
	}
	pinned := "registry.test/team/app@" + string(s.indexDesc.Digest)
	n.images.put(pinned, s.indexDesc, n.images.content[s.indexDesc.Digest])
	for _, name := range []string{pinned, "registry.test/" + imageName + "@" + string(s.indexDesc.Digest)} {
		if resp, err := n.prepare("c", named("%s", name)); err != nil || !resp.Restore || resp.Image != pinned {
			t.Errorf("%s: %+v, %v", name, resp, err)
		}
	}
	other := newSample(t)
	other.config.Container.Name = "other"
	n.push(other)
	n.images.put(pinned, other.indexDesc, n.images.content[other.indexDesc.Digest])
	if _, err := n.prepare("c2", named("%s", pinned)); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), string(other.indexDesc.Digest)) {
		t.Errorf("another image under that name: %v", err)
	}
}

// TestVerified: the digest that the verifiers see is the one that is restored, whatever the tag was before.
func TestVerified(t *testing.T) {
	n := newNode(t)
	dir := t.TempDir()
	accepted := filepath.Join(dir, "accepted")
	s := n.trust(policy.Options{VerifiersDir: verifier(t, `case $2 in *:bad) echo bad name; exit 1; esac; read -r digest <`+accepted+`; [ "$4" = "$digest" ] || { echo not signed; exit 1; }`), VerdictLifetime: time.Hour})
	if err := os.WriteFile(accepted, []byte(s.indexDesc.Digest+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := n.prepare("c", nil); err != nil {
		t.Fatal(err)
	}
	if err := n.manager.Release(t.Context(), ID("k8s.io", "c")); err != nil {
		t.Fatal(err)
	}
	// A warm restore is ready long before its verdict.
	n.images.put("registry.test/team/app:bad", s.indexDesc, n.images.content[s.indexDesc.Digest])
	if _, err := n.prepare("c", named("registry.test/team/app:bad")); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "bad name") {
		t.Errorf("got %v", err)
	}
	n.nothingLeft()
	// The same tag, the same name of a cached verdict, another image.
	other := newSample(t)
	other.config.Container.Name = "other"
	n.push(other)
	_, err := n.prepare("c", nil)
	if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "not signed") || !strings.Contains(err.Error(), string(other.indexDesc.Digest)) {
		t.Errorf("got %v", err)
	}
	n.nothingLeft()
}

// TestRefusedEarly: a refusal does not wait for what is fetched meanwhile, and a restore that fails ends its verifiers.
func TestRefusedEarly(t *testing.T) {
	n := newNode(t)
	n.trust(policy.Options{VerifiersDir: verifier(t, "echo not signed; exit 1")})
	slow := make(chan struct{})
	registry := n.registry
	n.answer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-slow:
		}
		registry.ServeHTTP(w, r)
	}))
	_, err := n.prepare("c", nil)
	close(slow)
	if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "not signed") {
		t.Errorf("got %v", err)
	}
	n.nothingLeft()

	n.answer(registry)
	n.trust(policy.Options{VerifiersDir: verifier(t, "exec sleep 9")})
	n.answer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }))
	if err := os.RemoveAll(filepath.Join(n.opts.CacheDir, "metadata")); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if _, err := n.prepare("c", nil); err == nil || strings.Contains(err.Error(), "context canceled") || time.Since(begin) > 5*time.Second {
		t.Errorf("got %v after %v", err, time.Since(begin))
	}
	n.nothingLeft()
}
