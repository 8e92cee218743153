// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protowire"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/registry"
)

// page returns a page of content that tells it from all others.
func page(n int) []byte {
	p := make([]byte, pageindex.PageSize)
	binary.LittleEndian.PutUint64(p, uint64(n)+1)
	return p
}

// entry is one entry of a pagemap.
type entry struct {
	start, pages uint64
	lazy         bool
}

// pagemap encodes CRIU's image of a pagemap.
func pagemap(pagesID int, entries ...entry) []byte {
	out := binary.LittleEndian.AppendUint32(nil, 0x54564319)
	out = binary.LittleEndian.AppendUint32(out, 0x56084025)
	add := func(m []byte) {
		out = binary.LittleEndian.AppendUint32(out, uint32(len(m)))
		out = append(out, m...)
	}
	number := func(m []byte, field protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), v)
	}
	add(number(nil, 1, uint64(pagesID)))
	for _, e := range entries {
		flags := uint64(4)
		if e.lazy {
			flags |= 2
		}
		add(number(number(number(nil, 1, e.start), 2, e.pages), 4, flags))
	}
	return out
}

// file is a file of a state.
type file struct {
	header tar.Header
	data   []byte
}

func regular(name string, data []byte) file {
	return file{tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(data)), Mode: 0o600}, data}
}

func packState(t testing.TB, files ...file) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	for _, f := range files {
		if err := w.WriteHeader(&f.header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// sample is a checkpoint that a test may spoil before it is pushed.
type sample struct {
	config    checkpoint.Config
	index     *pageindex.Index
	state     []file
	blobs     [][]byte
	pages     []byte // of blob 0, uncompressed
	spoil     func(kind string, p []byte) []byte
	manifest  func(*v1.Manifest)
	top       func(*v1.Index)
	indexDesc v1.Descriptor
}

// newSample is one process with two eager pages and five lazy ones, of which one
// is zero.
func newSample(t testing.TB) *sample {
	t.Helper()
	s := &sample{config: checkpoint.Config{
		Version: "1.0",
		Host:    checkpoint.Host{Architecture: runtime.GOARCH, PageSize: os.Getpagesize()},
	}}
	var chunks []pageindex.Chunk
	var blob []byte
	for _, n := range [][]int{{10, 11}, {12}, {13}} {
		var content []byte
		for _, i := range n {
			content = append(content, page(i)...)
		}
		frame, err := pageblob.Encode(nil, content)
		if err != nil {
			t.Fatal(err)
		}
		c := pageindex.Chunk{Size: uint32(len(frame)), Pages: uint32(len(n))}
		copy(c.SHA256[:], digestBytes(frame))
		chunks, blob, s.pages = append(chunks, c), append(blob, frame...), append(s.pages, content...)
	}
	b, err := pageindex.NewBlob(digest.FromBytes(blob), chunks)
	if err != nil {
		t.Fatal(err)
	}
	s.blobs = [][]byte{blob}
	s.index = &pageindex.Index{Blobs: []pageindex.Blob{b}, Processes: []pageindex.Process{{PID: 1, Runs: []pageindex.Run{
		{Start: 0x10000, Pages: 3, Blob: 0, Page: 0},
		{Start: 0x13000, Pages: 1, Blob: pageindex.Zero},
		{Start: 0x20000, Pages: 1, Blob: 0, Page: 3},
	}}}}
	eager := append(page(1), page(2)...)
	s.state = []file{
		// Its magic number, the length of one message, and in that the image version 2.
		regular("inventory.img", []byte{0x16, 0x31, 0x31, 0x58, 2, 0, 0, 0, 8, 2}),
		regular("pagemap-1.img", pagemap(7,
			entry{0x8000, 1, false}, entry{0x10000, 4, true}, entry{0x1a000, 1, false}, entry{0x20000, 1, true})),
		regular("pages-7.img", eager),
		regular(checkpoint.SpecFile, []byte("{}")),
		regular("stats-dump", []byte("x")),
	}
	return s
}

func digestBytes(p []byte) []byte {
	d := digest.FromBytes(p)
	out := make([]byte, 32)
	if _, err := fmt.Sscanf(d.Encoded(), "%64x", &out); err != nil {
		panic(err)
	}
	return out
}

// node is a registry, an image store and a manager.
type node struct {
	t        *testing.T
	registry http.Handler // guarded by mu: a test may exchange it while requests are under way
	mu       sync.Mutex
	server   *httptest.Server
	broken   atomic.Bool // the registry answers nothing but 503
	requests atomic.Int32
	images   *fakeImages
	opts     Options
	manager  *Manager
	store    *pagestore.Store
}

const imageName = "team/app:cp"

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, registry: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))), images: &fakeImages{targets: map[string]v1.Descriptor{}, content: map[digest.Digest][]byte{}}}
	n.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.requests.Add(1)
		if n.broken.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		n.serve(w, r)
	}))
	t.Cleanup(n.server.Close)
	certs := filepath.Join(t.TempDir(), "registry.test")
	if err := os.Mkdir(certs, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(certs, "hosts.toml"), fmt.Appendf(nil, "server = %q\n", n.server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	n.opts = Options{
		StateDir: filepath.Join(t.TempDir(), "state"), CacheDir: filepath.Join(t.TempDir(), "cache"),
		Images: n.images,
		Registry: registry.New(registry.Options{
			Hosts:   registry.Hosts(t.Context(), registry.HostOptions{CertsDir: filepath.Dir(certs)}),
			Timeout: 200 * time.Millisecond, StallTimeout: time.Second, Backoff: time.Millisecond,
		}),
		Limits:            Limits{MaxMemory: 1 << 30, MaxState: 1 << 20, MaxPageIndex: 1 << 20, Unused: 1, UnusedSize: 1 << 20},
		MetadataCacheSize: 1 << 30,
		Policy:            "cached",
	}
	n.start()
	t.Cleanup(n.stop)
	return n
}

// answer lets something else answer for the registry, and returns what did before.
func (n *node) answer(handler http.Handler) (before http.Handler) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before, n.registry = n.registry, handler
	return before
}

// serve adds byte ranges to the registry.
func (n *node) serve(w http.ResponseWriter, r *http.Request) {
	plain := r.Clone(r.Context())
	plain.Header.Del("Range")
	rec := httptest.NewRecorder()
	n.mu.Lock()
	handler := n.registry
	n.mu.Unlock()
	handler.ServeHTTP(rec, plain)
	if rec.Code != http.StatusOK || r.Method != http.MethodGet {
		w.WriteHeader(rec.Code)
		return
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(rec.Body.Bytes()))
}

func (n *node) start() {
	n.t.Helper()
	var err error
	n.store, err = pagestore.Open(context.Background(), pagestore.Options{
		Dir: filepath.Join(n.opts.CacheDir, "pages"), Parallel: 2, RequestSize: 1 << 20, CacheSize: 1 << 30,
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.opts.Pages = n.store
	if n.manager, err = Open(context.Background(), n.opts); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) stop() {
	n.manager.Close()
	if err := n.store.Close(); err != nil {
		n.t.Error(err)
	}
}

func (n *node) upload(method, path, mediaType string, p []byte) {
	n.t.Helper()
	rec := httptest.NewRecorder()
	req := httptest.NewRequest(method, path, bytes.NewReader(p))
	req.Header.Set("Content-Type", mediaType)
	n.registry.ServeHTTP(rec, req)
	if rec.Code != http.StatusCreated {
		n.t.Fatalf("%s %s: %d %s", method, path, rec.Code, rec.Body)
	}
}

// push puts a sample into registry and image store.
func (n *node) push(s *sample) {
	n.t.Helper()
	blob := func(kind, mediaType string, p []byte) v1.Descriptor {
		d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(p), Size: int64(len(p))}
		n.upload(http.MethodPost, "/v2/team/app/blobs/uploads/?digest="+d.Digest.String(), "application/octet-stream", p)
		return d
	}
	spoiled := func(kind string, p []byte) []byte {
		if s.spoil != nil {
			return s.spoil(kind, p)
		}
		return p
	}
	marshal := func(v any) []byte {
		p, err := json.Marshal(v)
		if err != nil {
			n.t.Fatal(err)
		}
		return p
	}
	index, err := s.index.Encode()
	if err != nil {
		n.t.Fatal(err)
	}
	m := v1.Manifest{MediaType: v1.MediaTypeImageManifest, ArtifactType: checkpoint.ArtifactType}
	m.SchemaVersion = 2
	m.Config = blob("config", checkpoint.MediaTypeConfig, spoiled("config", marshal(s.config)))
	m.Layers = []v1.Descriptor{
		blob("state", checkpoint.MediaTypeState, spoiled("state", packState(n.t, s.state...))),
		blob("index", checkpoint.MediaTypePageIndex, spoiled("index", index)),
	}
	for _, b := range s.blobs {
		m.Layers = append(m.Layers, blob("pages", checkpoint.MediaTypePages, b))
	}
	if s.manifest != nil {
		s.manifest(&m)
	}
	mp := marshal(m)
	md := v1.Descriptor{MediaType: v1.MediaTypeImageManifest, ArtifactType: checkpoint.ArtifactType, Digest: digest.FromBytes(mp), Size: int64(len(mp))}
	n.upload(http.MethodPut, "/v2/team/app/manifests/"+md.Digest.String(), md.MediaType, mp)
	top := v1.Index{MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{md}}
	top.SchemaVersion = 2
	if s.top != nil {
		s.top(&top)
	}
	ip := marshal(top)
	s.indexDesc = v1.Descriptor{MediaType: v1.MediaTypeImageIndex, Digest: digest.FromBytes(ip), Size: int64(len(ip))}
	n.images.put("registry.test/"+imageName, s.indexDesc, ip)
}

// fakeImages is an image store in memory.
type fakeImages struct {
	mu        sync.Mutex
	targets   map[string]v1.Descriptor
	content   map[digest.Digest][]byte
	container string
}

func (f *fakeImages) put(name string, d v1.Descriptor, p []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.targets[name], f.content[d.Digest] = d, p
}

func (f *fakeImages) Target(_ context.Context, _, name string) (v1.Descriptor, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, ok := f.targets[name]
	if !ok {
		return d, errdefs.ErrNotFound
	}
	return d, nil
}

func (f *fakeImages) ContainerImage(context.Context, string, string) (string, error) {
	return f.container, nil
}

func (f *fakeImages) Content(_ context.Context, _ string, d v1.Descriptor) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.content[d.Digest]
	if !ok {
		return nil, errdefs.ErrNotFound
	}
	return p, nil
}

// bundle writes a container's bundle.
func bundle(t testing.TB, change func(*specs.Spec)) string {
	t.Helper()
	s := &specs.Spec{
		Annotations: map[string]string{
			criContainerType: "container", criImageName: "registry.test/" + imageName,
			criSandboxName: "pod", criSandboxNamespace: "ns",
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}}},
	}
	if change != nil {
		change(s)
	}
	p, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), p, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (n *node) prepare(id string, change func(*specs.Spec)) (*api.PrepareResponse, error) {
	return n.manager.Prepare(context.Background(), &api.PrepareRequest{Namespace: "k8s.io", ContainerId: id, Bundle: bundle(n.t, change)})
}

func TestRestore(t *testing.T) {
	n := newNode(t)
	s := newSample(t)
	n.push(s)
	resp, err := n.prepare("c1", nil)
	if err != nil {
		t.Fatal(err)
	}
	if !resp.Restore || resp.RestoreId != "k8s.io/c1" || resp.Policy != "cached" || resp.PagesTotal != 5 || len(resp.Stores) != 1 {
		t.Fatalf("%+v", resp)
	}
	// CRIU's images: complete, with eager pages at their places and holes for
	// lazy ones.
	pages, err := os.ReadFile(filepath.Join(resp.ImagesDir, "pages-7.img"))
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 7*pageindex.PageSize)
	copy(want, page(1))
	copy(want[5*pageindex.PageSize:], page(2))
	if !bytes.Equal(pages, want) {
		t.Fatal("pages file is wrong")
	}
	names, err := os.ReadDir(resp.ImagesDir)
	if err != nil || len(names) != 3 {
		t.Fatalf("%v, %v", names, err)
	}
	p, err := os.ReadFile(resp.PageIndex)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pageindex.Parse(p); err != nil {
		t.Fatal(err)
	}
	if err := n.manager.Fetch(t.Context(), &api.FetchRequest{RestoreId: resp.RestoreId, Chunks: []uint32{1, 0}, Urgency: api.Urgency_DEMAND}); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(resp.Stores[0].Data)
	if err != nil || !bytes.Equal(data[:3*pageindex.PageSize], s.pages[:3*pageindex.PageSize]) {
		t.Fatalf("data: %v", err)
	}
	if list := n.manager.List(); len(list) != 1 || list[0].BytesFetched == 0 || list[0].State != StatePreparing || list[0].Pod != "ns/pod" {
		t.Fatalf("%+v", list)
	}
	for _, bad := range []*api.FetchRequest{{RestoreId: "other"}, {RestoreId: resp.RestoreId, Blob: 1}, {RestoreId: resp.RestoreId, Chunks: []uint32{1 << 31}}} {
		if err := n.manager.Fetch(t.Context(), bad); !errdefs.IsNotFound(err) && !errdefs.IsInvalidArgument(err) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if err := n.manager.Release(t.Context(), resp.RestoreId); err != nil {
		t.Fatal(err)
	}
	if err := n.manager.Release(t.Context(), resp.RestoreId); err != nil {
		t.Fatalf("second release: %v", err)
	}
	if list := n.manager.List(); len(list) != 0 {
		t.Fatalf("%+v", list)
	}
}

// TestShared: restores of one image at the same time fetch everything once, and
// a warm one needs no registry.
func TestShared(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			resp, err := n.prepare(fmt.Sprint("c", i), nil)
			if err != nil {
				t.Error(err)
				return
			}
			if err := n.manager.Fetch(context.Background(), &api.FetchRequest{RestoreId: resp.RestoreId, Chunks: []uint32{0, 1, 2}, Urgency: api.Urgency_DEMAND}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// Manifest, config, state, index; pages in one to three requests; one search for a working set.
	if got := n.requests.Load(); got < 5 || got > 9 {
		t.Errorf("%d requests for 8 restores", got)
	}
	n.broken.Store(true)
	if _, err := n.prepare("warm", nil); err != nil {
		t.Fatalf("a warm restore asked the registry: %v", err)
	}
	// Not laid out any more, but in the metadata cache.
	for i := range 8 {
		if err := n.manager.Release(t.Context(), ID("k8s.io", fmt.Sprint("c", i))); err != nil {
			t.Error(err)
		}
	}
	n.stop()
	if err := os.RemoveAll(n.opts.StateDir); err != nil {
		t.Fatal(err)
	}
	n.start()
	if _, err := n.prepare("cold", nil); err != nil {
		t.Fatalf("a restore with cached metadata asked the registry: %v", err)
	}
}

// TestNotRestored: what is to start as it would without thaw.
func TestNotRestored(t *testing.T) {
	n := newNode(t)
	s := newSample(t)
	s.top = func(i *v1.Index) { i.Manifests[0].ArtifactType = "" }
	n.push(s)
	single := v1.Descriptor{MediaType: v1.MediaTypeImageManifest, Digest: digest.FromString("x"), Size: 1}
	n.images.put("registry.test/single", single, nil)
	image := func(name string) func(*specs.Spec) {
		return func(s *specs.Spec) { s.Annotations[criImageName] = name }
	}
	for name, change := range map[string]func(*specs.Spec){
		"index without checkpoint": nil,
		"single manifest":          image("registry.test/single"),
		"unknown image":            image("registry.test/unknown"),
		"no image":                 image(""),
		"shared PID namespace":     func(s *specs.Spec) { s.Linux = nil },
	} {
		if resp, err := n.prepare("c", change); err != nil || resp.Restore {
			t.Errorf("%s: %+v, %v", name, resp, err)
		}
		_, err := n.prepare("c", func(s *specs.Spec) {
			if change != nil {
				change(s)
			}
			s.Annotations[AnnotationRestore] = "required"
		})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), AnnotationRestore) {
			t.Errorf("%s, required: %v", name, err)
		}
	}
	sandbox := func(s *specs.Spec) {
		s.Annotations[criContainerType] = criSandbox
		s.Annotations[AnnotationRestore] = "required" // pod annotations reach sandboxes too
	}
	if resp, err := n.prepare("c", sandbox); err != nil || resp.Restore {
		t.Errorf("sandbox: %+v, %v", resp, err)
	}
}

// TestContainerRecord: without CRI the container's record names the image.
func TestContainerRecord(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	n.images.container = "registry.test/" + imageName
	resp, err := n.prepare("c", func(s *specs.Spec) { s.Annotations = map[string]string{AnnotationPolicy: "lazy"} })
	if err != nil || !resp.Restore || resp.Policy != "lazy" {
		t.Fatalf("%+v, %v", resp, err)
	}
}

// TestRefused has one case for each kind of checkpoint or container that is
// refused by name; nothing may be left of it.
func TestRefused(t *testing.T) {
	damage := func(kind string) func(*sample) {
		return func(s *sample) {
			s.spoil = func(k string, p []byte) []byte {
				if k == kind {
					p = bytes.Clone(p)
					p[len(p)/2] ^= 0x55
					p = p[:len(p)-1]
				}
				return p
			}
		}
	}
	state := func(i int, f file) func(*sample) { return func(s *sample) { s.state[i] = f } }
	for name, tc := range map[string]struct {
		spoil func(*sample)
		spec  func(*specs.Spec)
		opts  func(*Options)
		is    func(error) bool
		want  string
	}{
		"image version": {spoil: func(s *sample) {
			s.top = func(i *v1.Index) { i.Manifests[0].ArtifactType = "application/vnd.thaw.checkpoint.v9" }
		}, is: errdefs.IsDataLoss, want: `format version "9" is not supported`},
		"config version":      {spoil: func(s *sample) { s.config.Version = "2.0" }, is: errdefs.IsDataLoss, want: `format version "2.0" is not supported`},
		"architecture":        {spoil: func(s *sample) { s.config.Host.Architecture = "s390x" }, is: errdefs.IsFailedPrecondition, want: `made on "s390x"`},
		"page size":           {spoil: func(s *sample) { s.config.Host.PageSize = 65536 }, is: errdefs.IsFailedPrecondition, want: "pages of 65536 bytes"},
		"damaged config":      {spoil: damage("config"), is: errdefs.IsDataLoss, want: "config"},
		"damaged index":       {spoil: damage("index"), is: errdefs.IsDataLoss, want: "page index"},
		"damaged state":       {spoil: damage("state"), is: errdefs.IsDataLoss, want: "state"},
		"unknown blob":        {spoil: func(s *sample) { s.manifest = func(m *v1.Manifest) { m.Layers = m.Layers[:2] } }, is: errdefs.IsDataLoss, want: "no layer of the manifest"},
		"blob size":           {spoil: func(s *sample) { s.manifest = func(m *v1.Manifest) { m.Layers[2].Size++ } }, is: errdefs.IsDataLoss, want: "the page index has"},
		"page missing":        {spoil: func(s *sample) { s.index.Processes[0].Runs = s.index.Processes[0].Runs[:2] }, is: errdefs.IsDataLoss, want: "from 0x20000 to 0x21000"},
		"zero page missing":   {spoil: func(s *sample) { s.index.Processes[0].Runs[1].Start += 4096 }, is: errdefs.IsDataLoss, want: "contradict"},
		"process missing":     {spoil: func(s *sample) { s.index.Processes[0].PID = 2 }, is: errdefs.IsDataLoss, want: "process 1"},
		"too many processes":  {spoil: func(s *sample) { s.index.Processes = append(s.index.Processes, pageindex.Process{PID: 9}) }, is: errdefs.IsDataLoss, want: "process 9, of which there is no pagemap"},
		"eager pages short":   {spoil: state(2, regular("pages-7.img", page(1))), is: errdefs.IsDataLoss, want: "pages-7.img"},
		"eager pages long":    {spoil: state(2, regular("pages-7.img", make([]byte, 3*4096))), is: errdefs.IsDataLoss, want: "pages-7.img"},
		"eager pages gone":    {spoil: func(s *sample) { s.state = append(s.state[:2:2], s.state[3:]...) }, is: errdefs.IsDataLoss, want: "pages-7.img"},
		"stray pages":         {spoil: state(4, regular("pages-8.img", page(1))), is: errdefs.IsDataLoss, want: "pages-8.img, to which no pagemap refers"},
		"state over limit":    {opts: func(o *Options) { o.Limits.MaxState = 100 }, is: errdefs.IsResourceExhausted, want: "limits.max_state"},
		"unpacked over limit": {opts: func(o *Options) { o.Limits.MaxState = 8000 }, is: errdefs.IsDataLoss, want: "limits.max_state"},
		"memory over limit":   {opts: func(o *Options) { o.Limits.MaxMemory = 4 * 4096 }, is: errdefs.IsResourceExhausted, want: "limits.max_memory"},
		"index over limit":    {opts: func(o *Options) { o.Limits.MaxPageIndex = 10 }, is: errdefs.IsResourceExhausted, want: "allowed are 10"},
		"CRIU": {opts: func(o *Options) {
			o.CheckCRIU = func(context.Context) error { return fmt.Errorf("CRIU is too old: %w", errdefs.ErrFailedPrecondition) }
		}, is: errdefs.IsFailedPrecondition, want: "CRIU is too old"},
		"not admitted": {opts: func(o *Options) {
			o.Admit = func(context.Context, string, string, []byte, *specs.Spec) error {
				return fmt.Errorf("mount /data: %w", errdefs.ErrFailedPrecondition)
			}
		}, is: errdefs.IsFailedPrecondition, want: "mount /data"},
		"PID namespace": {spec: func(s *specs.Spec) { s.Linux.Namespaces[0].Path = "/proc/1/ns/pid" }, is: errdefs.IsFailedPrecondition, want: "shareProcessNamespace"},
		"working set":   {spec: func(s *specs.Spec) { s.Annotations[AnnotationWorkingSet] = "push" }, is: errdefs.IsInvalidArgument, want: "record"},
		"policy":        {spec: func(s *specs.Spec) { s.Annotations[AnnotationPolicy] = "eager" }, is: errdefs.IsInvalidArgument, want: "lazy, cached, complete"},
		"annotation":    {spec: func(s *specs.Spec) { s.Annotations[AnnotationRestore] = "yes" }, is: errdefs.IsInvalidArgument, want: AnnotationRestore},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if tc.opts != nil {
				n.stop()
				tc.opts(&n.opts)
				n.start()
			}
			s := newSample(t)
			if tc.spoil != nil {
				tc.spoil(s)
			}
			n.push(s)
			_, err := n.prepare("c", tc.spec)
			if err == nil || !tc.is(err) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v, want one classed line with %q", err, tc.want)
			}
			left, _ := filepath.Glob(filepath.Join(n.opts.StateDir, "*", "*"))
			for _, path := range left {
				if name != "not admitted" { // the image is good and stays for others
					t.Errorf("left: %s", path)
				}
			}
			if len(n.manager.List()) != 0 || len(n.manager.repos) != 0 {
				t.Error("a restore or a repository is left")
			}
		})
	}
}

// TestUnusedImages: laid-out images are kept within the limits after their last
// use, and never removed before it.
func TestUnusedImages(t *testing.T) {
	for name, limits := range map[string]Limits{
		"number": {MaxMemory: 1 << 30, MaxState: 1 << 20, MaxPageIndex: 1 << 20, Unused: 0, UnusedSize: 1 << 30},
		"size":   {MaxMemory: 1 << 30, MaxState: 1 << 20, MaxPageIndex: 1 << 20, Unused: 9, UnusedSize: 100},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.stop()
			n.opts.Limits = limits
			n.start()
			n.push(newSample(t))
			var dir string
			for _, id := range []string{"a", "b"} {
				resp, err := n.prepare(id, nil)
				if err != nil {
					t.Fatal(err)
				}
				dir = resp.ImagesDir
			}
			for i, id := range []string{"a", "b"} {
				if _, err := os.Stat(dir); err != nil {
					t.Fatalf("removed while %d restores use it: %v", 2-i, err)
				}
				if err := n.manager.Release(t.Context(), ID("k8s.io", id)); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Fatalf("kept beyond the limit: %v", err)
			}
		})
	}
}

func TestRegistryDown(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	n.broken.Store(true)
	_, err := n.prepare("c", nil)
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "503") || !strings.Contains(err.Error(), imageName) {
		t.Fatalf("got %v", err)
	}
	n.broken.Store(false)
	if _, err := n.prepare("c", nil); err != nil {
		t.Fatalf("second try: %v", err)
	}
}

// TestRecovery: restores go on after the daemon was killed; those whose
// container is gone are forgotten, and nothing half-made stays.
func TestRecovery(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	kept, err := n.prepare("kept", nil)
	if err != nil {
		t.Fatal(err)
	}
	gone := bundle(t, nil)
	if _, err := n.manager.Prepare(t.Context(), &api.PrepareRequest{Namespace: "k8s.io", ContainerId: "gone", Bundle: gone}); err != nil {
		t.Fatal(err)
	}
	n.stop()
	if err := os.RemoveAll(gone); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"images/.tmp-1", "images/" + strings.Repeat("a", 64), "restores/.tmp-2"} {
		path := filepath.Join(n.opts.StateDir, dir)
		if strings.HasPrefix(dir, "restores") {
			err = os.WriteFile(path, nil, 0o600)
		} else {
			err = os.Mkdir(path, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(n.opts.StateDir, "restores", "x.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.start()
	if list := n.manager.List(); len(list) != 1 || list[0].ContainerId != "kept" {
		t.Fatalf("%+v", list)
	}
	if err := n.manager.Fetch(t.Context(), &api.FetchRequest{RestoreId: kept.RestoreId, Chunks: []uint32{0, 1, 2}, Urgency: api.Urgency_DEMAND}); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(n.opts.StateDir, "*", "*"))
	if len(left) != 2 {
		t.Fatalf("left: %v", left)
	}
	if _, err := os.Stat(kept.ImagesDir); err != nil {
		t.Fatal(err)
	}
}

// TestSweep: a restore that nobody releases ends with its container.
func TestSweep(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	if _, err := n.prepare("kept", nil); err != nil {
		t.Fatal(err)
	}
	gone := bundle(t, nil)
	if _, err := n.manager.Prepare(t.Context(), &api.PrepareRequest{Namespace: "k8s.io", ContainerId: "gone", Bundle: gone}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(gone); err != nil {
		t.Fatal(err)
	}
	n.manager.sweep()
	if list := n.manager.List(); len(list) != 1 || list[0].ContainerId != "kept" {
		t.Errorf("%+v", list)
	}
	if left, _ := filepath.Glob(filepath.Join(n.manager.RecordDir(), "*")); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

// TestFill: with the policy cached everything arrives once the container runs,
// and with lazy nothing does.
func TestFill(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	resp, err := n.prepare("c", nil)
	if err != nil {
		t.Fatal(err)
	}
	lazy, err := n.prepare("l", func(s *specs.Spec) { s.Annotations[AnnotationPolicy] = "lazy" })
	if err != nil {
		t.Fatal(err)
	}
	if before, err := n.manager.Report(t.Context(), &api.Status{RestoreId: lazy.RestoreId, State: StateLazy}); err != nil || before != StatePreparing {
		t.Fatalf("%q, %v", before, err)
	}
	r, err := n.manager.get(resp.RestoreId)
	if err != nil {
		t.Fatal(err)
	}
	if missing, _ := r.blobs[0].Missing(); missing != 3 {
		t.Fatalf("%d chunks are missing before the container runs", missing)
	}
	for range 2 { // the second report starts no second fill
		if _, err := n.manager.Report(t.Context(), &api.Status{RestoreId: resp.RestoreId, State: StateLazy, PagesPresent: 1, Namespace: "forged"}); err != nil {
			t.Fatal(err)
		}
	}
	n.manager.wg.Wait()
	if missing, _ := r.blobs[0].Missing(); missing != 0 {
		t.Fatalf("%d chunks are missing", missing)
	}
	for _, s := range n.manager.List() {
		if s.Namespace != "k8s.io" || s.PagesTotal != 5 {
			t.Errorf("%+v", s)
		}
	}
}

// TestUnpack has one case for each trick that a state may try.
func TestUnpack(t *testing.T) {
	big := tar.Header{Typeflag: tar.TypeReg, Name: "core-1.img", Size: 1 << 40}
	link := func(flag byte, name, to string) file {
		return file{header: tar.Header{Typeflag: flag, Name: name, Linkname: to}}
	}
	for name, tc := range map[string]struct {
		files []file
		want  string
	}{
		"parent folder":   {[]file{regular("../core-1.img", nil)}, "no CRIU image"},
		"absolute":        {[]file{regular("/etc/passwd", nil)}, "no CRIU image"},
		"sub folder":      {[]file{regular("x/core-1.img", nil)}, "no CRIU image"},
		"hidden":          {[]file{regular(".img", nil)}, "no CRIU image"},
		"empty name":      {[]file{regular("", nil)}, "no CRIU image"},
		"other name":      {[]file{regular("criu.conf", nil)}, "no CRIU image"},
		"symlink":         {[]file{link(tar.TypeSymlink, "core-1.img", "/etc/shadow")}, "no regular file"},
		"hard link":       {[]file{link(tar.TypeLink, "core-1.img", "/etc/shadow")}, "no regular file"},
		"parent link":     {[]file{link(tar.TypeSymlink, "parent", "/")}, "no regular file"},
		"folder":          {[]file{link(tar.TypeDir, "core-1.img", "")}, "no regular file"},
		"device":          {[]file{link(tar.TypeChar, "core-1.img", "")}, "no regular file"},
		"fifo":            {[]file{link(tar.TypeFifo, "core-1.img", "")}, "no regular file"},
		"twice":           {[]file{regular("core-1.img", nil), regular("core-1.img", nil)}, "twice"},
		"size":            {[]file{regular("core-1.img", make([]byte, 2<<20))}, "limits.max_state"},
		"size of skipped": {[]file{regular("stats-dump", make([]byte, 2<<20))}, "limits.max_state"},
	} {
		t.Run(name, func(t *testing.T) { refuseState(t, packState(t, tc.files...), tc.want) })
	}
	t.Run("declared size", func(t *testing.T) {
		var raw bytes.Buffer
		w := tar.NewWriter(&raw)
		if err := w.WriteHeader(&big); err != nil {
			t.Fatal(err)
		}
		refuseState(t, compress(t, raw.Bytes()), "limits.max_state")
	})
	t.Run("cut off", func(t *testing.T) {
		p := packState(t, regular("core-1.img", randomBytes(100_000)))
		refuseState(t, p[:len(p)-2000], "state")
	})
	t.Run("no zstd", func(t *testing.T) { refuseState(t, []byte("plain text, not compressed at all"), "state") })
	t.Run("no tar", func(t *testing.T) { refuseState(t, compress(t, randomBytes(2000)), "state") })
}

func randomBytes(n int) []byte {
	p := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(p)
	return p
}

func compress(t testing.TB, p []byte) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	return z.EncodeAll(p, nil)
}

func refuseState(t *testing.T, p []byte, want string) {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	err = unpackState(bytes.NewReader(p), root, 1<<20)
	if !errors.Is(err, checkpoint.ErrFormat) || !strings.Contains(err.Error(), want) {
		t.Fatalf("got %v, want %q", err, want)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(packState(f, newSample(f).state...), true)
	f.Add([]byte("core-1.img"), false)
	f.Fuzz(func(t *testing.T, p []byte, compressed bool) {
		if !compressed {
			p = compress(t, p)
		}
		outer := t.TempDir()
		dir := filepath.Join(outer, "in")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		if unpackState(bytes.NewReader(p), root, 1<<16) == nil {
			_ = expandPages(dir)
		}
		entries, err := os.ReadDir(outer)
		if err != nil || len(entries) != 1 {
			t.Fatalf("something was written outside: %v %v", entries, err)
		}
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() && !d.Type().IsRegular() {
				t.Fatalf("%s is not a regular file", path)
			}
			return nil
		})
	})
}
