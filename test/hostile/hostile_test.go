// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/admit"
	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/publish/archive"
	thawregistry "thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/restore"
	"thaw.dev/thaw/test/stack/registry"
)

// dump is what crictl wrote of a small container.
const dump = "../../snapshotter/publish/testdata/checkpoint.tar.zst"

// node is what of a node decides about a restore: a registry, an image store, the daemon's manager of restores with its default
// limits, and the bundle of a container.
type node struct {
	t        *testing.T
	registry *registry.Registry
	images   *imageStore
	manager  *restore.Manager
	pages    *pagestore.Store
	state    string
	cache    string
	spec     []byte
	base     string
	cached   map[string]bool // files of the metadata cache that were found to be what they are called

	mu       sync.Mutex
	tampered map[string][]byte // answers, by digest
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, images: &imageStore{}, state: filepath.Join(memory(t), "state"), cache: filepath.Join(t.TempDir(), "cache"), cached: make(map[string]bool), tampered: make(map[string][]byte)}
	var err error
	if n.registry, err = registry.Start("127.0.0.1:0", t.TempDir()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.registry.Close(); err != nil {
			t.Error(err)
		}
	})
	n.registry.Intercept(n.intercept)
	n.base = n.pushBase()
	certs := t.TempDir()
	if err := os.Mkdir(filepath.Join(certs, n.registry.Addr()), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(certs, n.registry.Addr(), "hosts.toml"), fmt.Appendf(nil, "server = %q\n", "http://"+n.registry.Addr()), 0o600); err != nil {
		t.Fatal(err)
	}
	limits := config.Default().Limits
	if n.pages, err = pagestore.Open(t.Context(), pagestore.Options{
		Dir: filepath.Join(n.cache, "pages"), Parallel: limits.ParallelFetches, RequestSize: int64(limits.RequestSize), CacheSize: int64(limits.CacheSize),
	}); err != nil {
		t.Fatal(err)
	}
	n.manager, err = restore.Open(t.Context(), restore.Options{
		StateDir: n.state, CacheDir: n.cache, Images: n.images, Pages: n.pages, Policy: config.PolicyCached,
		Registry: thawregistry.New(thawregistry.Options{
			Hosts:   thawregistry.Hosts(t.Context(), thawregistry.HostOptions{CertsDir: certs}),
			Timeout: 6 * time.Second, StallTimeout: 5 * time.Second, Backoff: time.Millisecond,
		}),
		Limits: restore.Limits{
			MaxMemory: int64(limits.MaxMemory), MaxState: int64(limits.MaxState), MaxPageIndex: int64(limits.MaxPageIndex),
		},
		MetadataCacheSize: int64(limits.MetadataCacheSize),
		Admit: func(_ context.Context, images, rootfs string, filter []byte, spec *specs.Spec) error {
			d, err := image.Open(images)
			if err != nil {
				return err
			}
			defer d.Close()
			// The dump's host decides which paths there are to mask, not this one.
			return admit.Check(d, spec, admit.Options{Rootfs: rootfs, Filter: filter, Exists: n.onDumpsHost})
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.manager.Close()
		if err := n.pages.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// memory makes a folder on a tmpfs, on which a daemon has its state, if this machine has one.
func memory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "hostile-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// onDumpsHost reports whether a path that containers have masked was there on the host of the dump.
func (n *node) onDumpsHost(path string) bool {
	return slices.Contains([]string{"/proc/acpi", "/proc/interrupts", "/proc/keys", "/proc/timer_list", "/sys/firmware", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"}, path)
}

// intercept answers what a trick wants in place of a blob.
func (n *node) intercept(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.mu.Lock()
		p, ok := n.tampered[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
		n.mu.Unlock()
		if !ok || r.Method != http.MethodGet {
			next.ServeHTTP(w, r)
			return
		}
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", v1.MediaTypeImageManifest)
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(p))
	})
}

func (n *node) pushBase() string {
	n.t.Helper()
	img, err := mutate.Config(empty.Image, ggcr.Config{})
	if err != nil {
		n.t.Fatal(err)
	}
	ref := n.registry.Ref("base/tiny:1")
	r, err := name.ParseReference(ref)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		n.t.Fatal(err)
	}
	return ref
}

// publish makes a good checkpoint image of the dump, and takes it apart.
func (n *node) publish() *Source {
	n.t.Helper()
	a, err := archive.Open(n.t.Context(), dump, archive.Options{TempDir: n.t.TempDir(), Base: n.base})
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() {
		if err := a.Close(); err != nil {
			n.t.Error(err)
		}
	}()
	n.spec = a.Source.Spec
	r, err := publish.Publish(n.t.Context(), a.Source, publish.Target{Reference: n.registry.Ref("cp/tiny:good")})
	if err != nil {
		n.t.Fatal(err)
	}
	s, err := Pull(n.t.Context(), r.Reference)
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

// imageStore is a node's image store, from which a restore can only read.
type imageStore struct {
	target  v1.Descriptor
	content []byte
}

func (i *imageStore) Target(context.Context, string, string) (v1.Descriptor, error) {
	return i.target, nil
}

func (i *imageStore) ContainerImage(context.Context, string, string) (string, error) {
	return "", errdefs.ErrNotFound
}

func (i *imageStore) Content(context.Context, string, v1.Descriptor) ([]byte, error) {
	return i.content, nil
}

// try does with an image what a node does until its processes run, and once a process touches its memory. It returns where
// it was refused, if it was before memory was touched.
func (n *node) try(p *Pushed, pod func(*specs.Spec)) (late bool, err error) {
	n.images.target, n.images.content = p.Index, p.Content
	n.mu.Lock()
	clear(n.tampered)
	for d, content := range p.Answers {
		n.tampered[d.String()] = content
	}
	n.mu.Unlock()
	bundle := n.t.TempDir()
	var spec specs.Spec
	if err := json.Unmarshal(n.spec, &spec); err != nil {
		n.t.Fatal(err)
	}
	spec.Annotations["io.kubernetes.cri.image-name"] = p.Reference
	spec.Annotations[restore.AnnotationRestore] = "required"
	spec.Annotations[restore.AnnotationWorkingSet] = "record" // else it looks for one in the background
	if pod != nil {
		pod(&spec)
	}
	raw, err := json.Marshal(&spec)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(bundle, "rootfs", "etc"), 0o755); err != nil {
		n.t.Fatal(err)
	}
	ctx := n.t.Context()
	resp, err := n.manager.Prepare(ctx, &api.PrepareRequest{Namespace: "k8s.io", ContainerId: "c", Bundle: bundle})
	if err != nil {
		return false, err
	}
	defer func() {
		if rerr := n.manager.Release(ctx, resp.RestoreId); rerr != nil {
			n.t.Error(rerr)
		}
	}()
	if err := n.manager.Admit(ctx, resp.RestoreId, filepath.Join(bundle, "rootfs"), refusesAll); err != nil {
		return false, err
	}
	for blob := range resp.Stores {
		if err := n.manager.Fetch(ctx, &api.FetchRequest{RestoreId: resp.RestoreId, Blob: uint32(blob), Chunks: []uint32{0}, Urgency: api.Urgency_DEMAND}); err != nil {
			return true, err
		}
	}
	return false, nil
}

// left returns what is left of an image on the node: files beside the cache of content that has the digest in its name.
func (n *node) left() (out []string) {
	for _, dir := range []string{n.state, n.cache} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() && filepath.Dir(filepath.Dir(path)) != n.state {
				return err
			}
			if filepath.Base(filepath.Dir(path)) == "metadata" && !n.cached[path] {
				sum, err := sumOf(path)
				n.cached[path] = err == nil && sum == d.Name()
			}
			if n.cached[path] {
				return nil
			}
			if strings.HasPrefix(path, filepath.Join(n.cache, "pages")) && d.Name() != "data" { // of a blob: which pages are there
				return nil
			}
			out = append(out, path)
			return nil
		})
		if err != nil {
			n.t.Error(err)
		}
	}
	return out
}

// settled waits until no file of a restore is open any more, since a fetch that was given up closes its blob when it ends, and returns
// those that are after a while.
func (n *node) settled() (open []string) {
	pace := time.NewTicker(5 * time.Millisecond)
	defer pace.Stop()
	for limit := time.Now().Add(20 * time.Second); ; <-pace.C {
		if open = n.opened(); len(open) == 0 || time.Now().After(limit) {
			return open
		}
	}
}

// opened returns the files of the node that this process has open.
func (n *node) opened() (out []string) {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		n.t.Fatal(err)
	}
	for _, fd := range fds {
		if path, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name())); err == nil && (strings.HasPrefix(path, n.state) || strings.HasPrefix(path, n.cache)) && filepath.Base(path) != ".lock" {
			out = append(out, path)
		}
	}
	return out
}

func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	d, err := digest.FromReader(f)
	return d.Encoded(), err
}

// peak returns the most memory that this process has had since the last call, in bytes.
func peak(t *testing.T) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	kib, err := strconv.ParseInt(string(m[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	const resetPeak = "5"
	if err := os.WriteFile("/proc/self/clear_refs", []byte(resetPeak), 0); err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// plain reports whether a text is one line without anything that a terminal obeys.
func plain(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}
