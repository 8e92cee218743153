// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	ggcrregistry "github.com/google/go-containerregistry/pkg/registry"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/publish/archive"
)

// counting is a registry that knows what was sent to it, and may be told to
// fail. Unlike the one that it is made of, it keeps the blobs of repositories
// apart and mounts them.
type counting struct {
	*httptest.Server
	mu      sync.Mutex
	sent    int64           // bytes in request bodies
	has     map[string]bool // REPOSITORY@DIGEST
	mounted []string        // REPOSITORY@DIGEST
	fail    func(*http.Request) int
}

func newRegistry(t *testing.T) *counting {
	t.Helper()
	c := &counting{has: make(map[string]bool)}
	inner := ggcrregistry.New(ggcrregistry.Logger(log.New(io.Discard, "", 0)))
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if code := c.answer(r); code != 0 {
			w.WriteHeader(code)
			return
		}
		r.Body = &countedBody{r.Body, c}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(c.Close)
	return c
}

// answer returns the status of requests that do not reach the inner registry.
func (c *counting) answer(r *http.Request) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		if code := c.fail(r); code != 0 {
			return code
		}
	}
	repo, rest, ok := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v2/"), "/blobs/")
	q := r.URL.Query()
	switch {
	case !ok:
	case r.Method == http.MethodPost && c.has[q.Get("from")+"@"+q.Get("mount")]:
		c.has[repo+"@"+q.Get("mount")] = true
		c.mounted = append(c.mounted, repo+"@"+q.Get("mount"))
		return http.StatusCreated
	case r.Method == http.MethodPut:
		c.has[repo+"@"+q.Get("digest")] = true
	case r.Method == http.MethodHead && !c.has[repo+"@"+rest], r.Method == http.MethodGet && !c.has[repo+"@"+rest]:
		return http.StatusNotFound
	}
	return 0
}

type countedBody struct {
	io.ReadCloser
	c *counting
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.c.mu.Lock()
	b.c.sent += int64(n)
	b.c.mu.Unlock()
	return n, err
}

func (c *counting) ref(s string) string { return strings.TrimPrefix(c.URL, "http://") + "/" + s }

// taken returns the bytes sent since the last call.
func (c *counting) taken() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.sent
	c.sent = 0
	return n
}

// pushBase makes an image of two layers of 1 MiB with settings that thaw does
// not know.
func pushBase(t *testing.T, ref string) ggcr.Image {
	t.Helper()
	var layers []ggcr.Layer
	for range 2 {
		l, err := random.Layer(1<<20, types.DockerLayer)
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, l)
	}
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", "amd64"
	cfg.Config.Entrypoint = []string{"/tiny"}
	cfg.Config.Labels = map[string]string{"keep": "me"}
	cfg.Config.Healthcheck = &ggcr.HealthConfig{Test: []string{"CMD", "true"}}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
	return img
}

func openArchive(t *testing.T, base string) *archive.Archive {
	t.Helper()
	a, err := archive.Open(context.Background(), "testdata/checkpoint.tar.zst", archive.Options{TempDir: t.TempDir(), Base: base})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func get(t *testing.T, ref string) []byte {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	d, err := remote.Get(r)
	if err != nil {
		t.Fatal(err)
	}
	return d.Manifest
}

func blob(t *testing.T, repo string, d v1.Descriptor) []byte {
	t.Helper()
	r, err := name.NewDigest(repo + "@" + d.Digest.String())
	if err != nil {
		t.Fatal(err)
	}
	l, err := remote.Layer(r)
	if err != nil {
		t.Fatal(err)
	}
	rc, err := l.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	p, err := io.ReadAll(rc)
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(p)) != d.Size {
		t.Fatalf("%s has %d bytes, its descriptor says %d", d.MediaType, len(p), d.Size)
	}
	return p
}

func TestPublish(t *testing.T) {
	reg := newRegistry(t)
	base := pushBase(t, reg.ref("base/app:1"))
	reg.taken()
	src := openArchive(t, reg.ref("base/app:1")).Source
	var last publish.Progress
	r, err := publish.Publish(context.Background(), src, publish.Target{Reference: reg.ref("cp/app:warm"), Progress: func(p publish.Progress) { last = p }})
	if err != nil {
		t.Fatal(err)
	}

	// Base layers are mounted: what was sent is less than one of them.
	if n := reg.taken(); n > 256<<10 {
		t.Errorf("%d bytes were uploaded", n)
	}
	if len(reg.mounted) != 2 {
		t.Errorf("mounted %v", reg.mounted)
	}
	if last.Memory != last.MemoryTotal || last.MemoryTotal != r.Config.Memory.Lazy || last.Uploaded != r.Uploaded {
		t.Errorf("progress %+v, result %+v", last, r)
	}

	img, err := publish.Read(context.Background(), r.Reference, "")
	if err != nil {
		t.Fatal(err)
	}
	if len(img.Index.Manifests) != 2 {
		t.Fatalf("index of %d manifests", len(img.Index.Manifests))
	}
	checkRunnable(t, reg, base, img)
	c, err := img.Config(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	checkConfig(t, c)
	checkMemory(t, reg, src, img)
	checkState(t, reg, src, img)
}

func checkRunnable(t *testing.T, reg *counting, base ggcr.Image, img *publish.Image) {
	t.Helper()
	desc := img.Index.Manifests[0]
	if p := desc.Platform; p == nil || p.OS != "linux" || p.Architecture != "amd64" {
		t.Errorf("runnable image for %+v", desc.Platform)
	}
	if p := img.Index.Manifests[1].Platform; p == nil || p.OS != "unknown" || p.Architecture != "unknown" {
		t.Errorf("checkpoint for %+v", p)
	}
	var m v1.Manifest
	if err := json.Unmarshal(get(t, reg.ref("cp/app@"+desc.Digest.String())), &m); err != nil {
		t.Fatal(err)
	}
	layers, err := base.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Layers) != 3 {
		t.Fatalf("%d layers", len(m.Layers))
	}
	for i, l := range layers {
		d, err := l.Digest()
		if err != nil {
			t.Fatal(err)
		}
		if m.Layers[i].Digest.String() != d.String() || m.Layers[i].MediaType != v1.MediaTypeImageLayerGzip {
			t.Errorf("layer %d is %+v", i, m.Layers[i])
		}
	}
	// The layer of changes: one file, and the diff ID is right.
	zr, err := zstd.NewReader(bytes.NewReader(blob(t, reg.ref("cp/app"), m.Layers[2])))
	if err != nil {
		t.Fatal(err)
	}
	defer zr.Close()
	changes, err := io.ReadAll(zr)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for tr := tar.NewReader(bytes.NewReader(changes)); ; {
		h, err := tr.Next()
		if err != nil {
			break
		}
		names = append(names, h.Name)
	}
	if !slices.Contains(names, "written") {
		t.Errorf("changes have the files %q", names)
	}
	var cfg struct {
		v1.Image
		Config struct {
			Labels      map[string]string
			Entrypoint  []string
			Healthcheck map[string]any
		} `json:"config"`
	}
	if err := json.Unmarshal(blob(t, reg.ref("cp/app"), m.Config), &cfg); err != nil {
		t.Fatal(err)
	}
	if n := len(cfg.RootFS.DiffIDs); n != 3 || cfg.RootFS.DiffIDs[2].Encoded() != fmt.Sprintf("%x", sha256.Sum256(changes)) {
		t.Errorf("diff IDs %v", cfg.RootFS.DiffIDs)
	}
	if cfg.Config.Labels["keep"] != "me" || cfg.Config.Labels[checkpoint.LabelID] != img.Checkpoint.Manifest.Digest.String() {
		t.Errorf("labels %v", cfg.Config.Labels)
	}
	if cfg.Config.Healthcheck == nil || len(cfg.Config.Entrypoint) != 1 {
		t.Errorf("settings were lost: %+v", cfg.Config)
	}
}

func checkConfig(t *testing.T, c *checkpoint.Config) {
	t.Helper()
	if c.Version != "1.0" || c.Host.Architecture != "amd64" || c.Host.CRIU != "4.2.1" || c.Container.Name != "main" || c.Host.PageSize != 4096 {
		t.Errorf("config %+v", c)
	}
	m := c.Memory
	if m.Total != m.Lazy+m.Eager || m.Zero != 24*4096 || m.Eager == 0 {
		t.Errorf("memory %+v", m)
	}
	if len(c.Processes) != 2 || c.Processes[0].Name != "tiny" || c.Processes[1].PPID != 1 || !slices.Contains(c.Processes[0].Caps, "CAP_KILL") {
		t.Errorf("processes %+v", c.Processes)
	}
	if len(c.Sockets) != 1 || c.Sockets[0].Local != "0.0.0.0:8080" || c.Sockets[0].State != "listen" {
		t.Errorf("sockets %+v", c.Sockets)
	}
	if !slices.ContainsFunc(c.Mounts, func(m checkpoint.Mount) bool { return m.Destination == "/etc/hosts" }) {
		t.Errorf("mounts %+v", c.Mounts)
	}
}

// checkMemory reads every lazy page through the index and compares it with
// CRIU's file.
func checkMemory(t *testing.T, reg *counting, src *publish.Source, img *publish.Image) {
	t.Helper()
	x, err := img.PageIndex(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	var content [][]byte
	for i := range x.Blobs {
		b := &x.Blobs[i]
		raw := blob(t, reg.ref("cp/app"), img.Checkpoint.Pages[i])
		var pages []byte
		for k, c := range b.Chunks {
			p := make([]byte, int(c.Pages)*pageindex.PageSize)
			if err := pageblob.Decode(p, c, raw[b.Offset(k):b.Offset(k+1)]); err != nil {
				t.Fatal(err)
			}
			pages = append(pages, p...)
		}
		content = append(content, pages)
	}
	maps, err := src.Images.Pagemaps()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, m := range maps {
		f, err := src.Images.OpenPages(m)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		p, _ := x.Process(uint32(m.ID))
		got := make(map[uint64][]byte)
		for _, r := range p.Runs {
			for i := range r.Pages {
				page := make([]byte, pageindex.PageSize)
				if r.Blob != pageindex.Zero {
					page = content[r.Blob][(r.Page+i)*pageindex.PageSize:][:pageindex.PageSize]
				}
				got[r.Start+i*pageindex.PageSize] = page
			}
		}
		for r := range m.Lazy() {
			for i := range r.Pages {
				want := make([]byte, pageindex.PageSize)
				if _, err := f.ReadAt(want, r.Offset+int64(i)*pageindex.PageSize); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got[r.Start+i*pageindex.PageSize], want) {
					t.Fatalf("process %d: page at %#x differs", m.ID, r.Start+i*pageindex.PageSize)
				}
				delete(got, r.Start+i*pageindex.PageSize)
				n++
			}
		}
		if len(got) != 0 {
			t.Errorf("process %d: the index has %d pages too many", m.ID, len(got))
		}
	}
	if n == 0 {
		t.Fatal("no lazy pages were compared")
	}
}

// checkState unpacks the state, expands the pages files and compares all with
// the dump.
func checkState(t *testing.T, reg *counting, src *publish.Source, img *publish.Image) {
	t.Helper()
	zr, err := zstd.NewReader(bytes.NewReader(blob(t, reg.ref("cp/app"), img.Checkpoint.State)))
	if err != nil {
		t.Fatal(err)
	}
	defer zr.Close()
	maps, err := src.Images.Pagemaps()
	if err != nil {
		t.Fatal(err)
	}
	left := make(map[string]bool)
	for _, f := range src.Images.Files() {
		left[f.Name] = f.Kind != image.Diagnostic
	}
	for tr := tar.NewReader(zr); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() > 0 {
			t.Errorf("header %+v", h)
		}
		if h.Name == checkpoint.SpecFile {
			continue
		}
		var got bytes.Buffer
		if i := slices.IndexFunc(maps, func(m *image.Pagemap) bool { return m.File() == h.Name }); i >= 0 {
			if h.Size != maps[i].EagerSize() {
				t.Errorf("%s has %d bytes, eager are %d", h.Name, h.Size, maps[i].EagerSize())
			}
			out, err := os.Create(filepath.Join(t.TempDir(), h.Name))
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			if err := maps[i].ExpandEager(out, tr); err != nil {
				t.Fatal(err)
			}
		} else {
			want, err := src.Images.Open(h.Name)
			if err != nil {
				t.Fatal(err)
			}
			defer want.Close()
			if _, err := got.ReadFrom(tr); err != nil {
				t.Fatal(err)
			}
			if p, err := io.ReadAll(want); err != nil || !bytes.Equal(p, got.Bytes()) {
				t.Errorf("%s differs: %v", h.Name, err)
			}
		}
		delete(left, h.Name)
	}
	for name, wanted := range left {
		if wanted {
			t.Errorf("%s is missing", name)
		}
	}
}

// The second checkpoint sends no memory, and the first one's blob is mounted into
// another repository. Everything about it is the same, so that the same dump has
// the same digest.
func TestPublishAgain(t *testing.T) {
	reg := newRegistry(t)
	pushBase(t, reg.ref("base/app:1"))
	src := openArchive(t, reg.ref("base/app:1")).Source
	ctx := context.Background()
	first, err := publish.Publish(ctx, src, publish.Target{Reference: reg.ref("cp/app:1")})
	if err != nil {
		t.Fatal(err)
	}
	second, err := publish.Publish(ctx, src, publish.Target{Reference: reg.ref("cp/app:1")})
	if err != nil {
		t.Fatal(err)
	}
	if m := second.Config.Memory; m.Compressed != 0 || m.Reused == 0 {
		t.Errorf("memory of the second %+v", m)
	}
	other, err := publish.Publish(ctx, src, publish.Target{Reference: reg.ref("cp/other:1"), Reuse: []string{first.Reference}})
	if err != nil {
		t.Fatal(err)
	}
	if m := other.Config.Memory; m.Compressed != 0 {
		t.Errorf("memory in another repository %+v", m)
	}
	img, err := publish.Read(ctx, other.Reference, "")
	if err != nil {
		t.Fatal(err)
	}
	blob(t, reg.ref("cp/other"), img.Checkpoint.Pages[0])

	third, err := publish.Publish(ctx, src, publish.Target{Reference: reg.ref("fresh/app:1")})
	if err != nil {
		t.Fatal(err)
	}
	if third.Digest != first.Digest {
		t.Errorf("the same dump has the digests %s and %s", first.Digest, third.Digest)
	}
	if _, err := publish.Publish(ctx, src, publish.Target{Reference: reg.ref("cp/x:1"), Reuse: []string{reg.ref("nothing:here")}}); err == nil {
		t.Error("a missing checkpoint was reused")
	}
}

// containerd records where a layer came from without the registry's port.
func TestMountWithoutPort(t *testing.T) {
	reg := newRegistry(t)
	pushBase(t, reg.ref("base/app:1"))
	src := openArchive(t, reg.ref("base/app:1")).Source
	for i := range src.Base.Layers {
		src.Base.Layers[i].Repositories = []string{"elsewhere.example/base/app", "127.0.0.1/base/gone", "127.0.0.1/base/app"}
	}
	if _, err := publish.Publish(context.Background(), src, publish.Target{Reference: reg.ref("cp/app:1")}); err != nil {
		t.Fatal(err)
	}
	if len(reg.mounted) != 2 {
		t.Errorf("mounted %v", reg.mounted)
	}
}

// The base is in another registry: its layers are copied.
func TestPublishToAnotherRegistry(t *testing.T) {
	from, to := newRegistry(t), newRegistry(t)
	pushBase(t, from.ref("base/app:1"))
	src := openArchive(t, from.ref("base/app:1")).Source
	if _, err := publish.Publish(context.Background(), src, publish.Target{Reference: to.ref("cp/app:1")}); err != nil {
		t.Fatal(err)
	}
	if n := to.taken(); n < 2<<20 {
		t.Errorf("only %d bytes were sent", n)
	}
	// Once they are there, they are not sent again.
	if _, err := publish.Publish(context.Background(), src, publish.Target{Reference: to.ref("cp/app:2")}); err != nil {
		t.Fatal(err)
	}
	if n := to.taken(); n > 256<<10 {
		t.Errorf("%d bytes were sent the second time", n)
	}
}

func TestPublishRetries(t *testing.T) {
	reg := newRegistry(t)
	pushBase(t, reg.ref("base/app:1"))
	src := openArchive(t, reg.ref("base/app:1")).Source
	failed := false
	reg.fail = func(r *http.Request) int {
		if r.Method == http.MethodPatch && !failed {
			failed = true
			return http.StatusServiceUnavailable
		}
		return 0
	}
	if _, err := publish.Publish(context.Background(), src, publish.Target{Reference: reg.ref("cp/app:1")}); err != nil {
		t.Fatal(err)
	}
	if !failed {
		t.Error("nothing failed")
	}
}

func TestPublishErrors(t *testing.T) {
	reg := newRegistry(t)
	pushBase(t, reg.ref("base/app:1"))
	src := openArchive(t, reg.ref("base/app:1")).Source
	ctx := context.Background()
	for ref, want := range map[string]string{
		"":                                    "no image reference",
		"UPPER/case":                          "no image reference",
		"a@sha256:" + strings.Repeat("0", 64): "digest",
	} {
		if _, err := publish.Publish(ctx, src, publish.Target{Reference: ref}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	reg.fail = func(r *http.Request) int {
		if r.Method == http.MethodPost {
			return http.StatusForbidden
		}
		return 0
	}
	_, err := publish.Publish(ctx, src, publish.Target{Reference: reg.ref("cp/app:1")})
	if err == nil || !strings.Contains(err.Error(), "log in") || strings.Contains(err.Error(), "\n") {
		t.Errorf("forbidden: %v", err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := publish.Publish(cancelled, src, publish.Target{Reference: reg.ref("cp/app:1")}); err == nil {
		t.Error("published after the end")
	}
	if _, err := publish.Read(ctx, reg.ref("base/app:1"), ""); !errors.Is(err, checkpoint.ErrNoCheckpoint) {
		t.Errorf("ordinary image: %v", err)
	}
}
