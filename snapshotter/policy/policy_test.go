// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

var (
	here      = digest.FromString("here")
	elsewhere = digest.FromString("elsewhere")
)

// says checks that an error is one plain line with some words.
func says(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Error("not refused")
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
	if strings.ContainsAny(err.Error(), "\n\r\x1b") {
		t.Errorf("%q is no plain line", err)
	}
}

func TestNothingRestricted(t *testing.T) {
	p, err := New(Options{VerdictLifetime: 1})
	if p != nil || err != nil {
		t.Fatalf("%+v %v", p, err)
	}
	if p.Verifies() || p.Admits("\n", "") != nil || p.Verify(t.Context(), "\n", index) != nil {
		t.Error("something is restricted")
	}
}

func TestRepositories(t *testing.T) {
	p, err := New(Options{Repositories: []string{"registry.example/agents/*", "registry.example/one", "localhost:5000/*", "docker.io/library/redis", "docker.io/team/*"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"registry.example/agents/warm:1":              true,
		"registry.example/agents/a/b@" + string(here): true,
		"registry.example/agents:1":                   false,
		"registry.example/agentsmith/warm:1":          false,
		"registry.example:5000/agents/warm:1":         false,
		"registry.example.evil.example/agents/warm":   false,
		"evil.example/registry.example/agents/warm":   false,
		"registry.example/one:2":                      true,
		"registry.example/one/more:2":                 false,
		"localhost:5000/anything":                     true,
		"localhost/anything":                          false,
		"redis:7":                                     true, // docker.io/library/redis
		"library/redis":                               true,
		"team/thing":                                  true,
		"nginx":                                       false,
		"registry.example/agents/../secret:1":         false,
		"registry.example/agents/\x1b[2Jwarm\nforged": false,
		"": false,
	} {
		err := p.Admits(name, here)
		if want {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		says(t, err, "may not be restored", string(here), "trust")
		if !errdefs.IsPermissionDenied(err) {
			t.Errorf("class of %v", err)
		}
	}
	says(t, p.Admits("evil.example/a/b:1", here), `"evil.example/a/b:1"`, string(here), "trust.repositories", "evil.example/a/b:", "admin")
}

func TestPatterns(t *testing.T) {
	for _, s := range []string{
		"", "*", "/*", "agents/*", "registry.example", "registry.example/", "registry.example/*/x", "registry.example/a*", "registry.example/a/**",
		"registry.example/a:1", "registry.example/a@" + string(here), "docker.io/redis", "index.docker.io/library/redis", "Registry.example/A", "https://registry.example/a",
		"registry.example/a\n",
	} {
		_, err := New(Options{Repositories: []string{s}})
		says(t, err, "trust.repositories", "HOST/PATH", "agents/*")
	}
}

func TestDigest(t *testing.T) {
	p, err := New(Options{RequireDigest: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"registry.example/a@" + string(here), "registry.example/a:1@" + string(here)} {
		if err := p.Admits(name, here); err != nil {
			t.Error(err)
		}
		says(t, p.Admits(name, elsewhere), "trust.require_digest", string(elsewhere), "another one in containerd's image store", "pull")
	}
	says(t, p.Admits("registry.example/a:1", here), "trust.require_digest", "registry.example/a@"+string(here))
	says(t, p.Admits("no reference", here), "references to a repository")
}
