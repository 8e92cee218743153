// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pelletier/go-toml/v2"
)

func TestParse(t *testing.T) {
	c, err := Parse([]byte(`
state_dir = "/tmp/s"
policy = "lazy"
[registry]
timeout = "5s"
[limits]
cache_size = "3GiB"
request_size = "1MiB"
[snapshotter]
enable = false
`))
	if err != nil {
		t.Fatal(err)
	}
	if c.Policy != PolicyLazy || c.Limits.CacheSize != 3<<30 || time.Duration(c.Registry.Timeout) != 5*time.Second || c.Snapshotter.Enable {
		t.Fatalf("%+v", c)
	}
	if c.Snapshotter.Socket != "/tmp/s/snapshotter.sock" || c.Socket() != "/tmp/s/thaw.sock" {
		t.Fatalf("sockets %s %s", c.Snapshotter.Socket, c.Socket())
	}
	if c.Limits.ParallelFetches != Default().Limits.ParallelFetches {
		t.Fatal("a default was lost")
	}
}

func TestRefused(t *testing.T) {
	for in, want := range map[string]string{
		"polcy = \"lazy\"":                         "unknown key polcy (line 1)",
		"[limits]\ncache = 3":                      "unknown key limits.cache (line 2)",
		"policy = \"never\"":                       "policy is \"never\": use one of lazy, cached, complete",
		"state_dir = \"run\"":                      "state_dir is \"run\": an absolute path",
		"[metrics]\naddress = \"0.0.0.0:1\"":       "loopback",
		"[page_server]\naddress = \"lo:1\"":        "page_server.address is \"lo:1\": an IP address",
		"[limits]\ncache_size = \"3 parsec\"":      "is not a size",
		"[limits]\nparallel_fetches = 0":           "limits.parallel_fetches is 0",
		"[limits]\nmax_memory = \"9999999TiB\"":    "size",
		"[registry]\ntimeout = \"soon\"":           "duration",
		"[trust]\nverifiers_dir = \"bin\"":         "trust.verifiers_dir is \"bin\": an absolute path",
		"[trust]\nverdict_lifetime = \"-1s\"":      "trust.verdict_lifetime",
		"[decryption]\nkeys_dir = \"\"":            "decryption.keys_dir is \"\": an absolute path",
		"[decryption]\nkeyprovider_config = \"k\"": "decryption.keyprovider_config is \"k\": an absolute path",
		"[trust]\nrepository = [\"a\"]":            "unknown key trust.repository",
		"state_dir = ":                             "line 1",
	} {
		_, err := Parse([]byte(in))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: got %v, want one line with %q", in, err, want)
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.toml")
	if _, err := Load(path); err == nil {
		t.Error("a missing file that was named is accepted")
	}
	if err := os.WriteFile(path, []byte("policy = \"complete\""), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(path); err != nil || c.Policy != PolicyComplete {
		t.Fatalf("%+v, %v", c, err)
	}
}

// TestRoundTrip proves that the defaults can be written as a file and mean the same.
func TestRoundTrip(t *testing.T) {
	want := Default()
	if err := want.finish(); err != nil {
		t.Fatal(err)
	}
	p, err := toml.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("policy = \"lazy\"\n[limits]\ncache_size = \"1GiB\""))
	f.Fuzz(func(_ *testing.T, p []byte) { _, _ = Parse(p) })
}
