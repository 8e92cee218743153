// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// fixture is a page blob with its content.
type fixture struct {
	blob  pageindex.Blob
	raw   []byte // as in the registry
	pages []byte // uncompressed
}

// newFixture makes a blob of chunks with 1 to 8 pages each.
func newFixture(t testing.TB, seed byte, chunks int) *fixture {
	t.Helper()
	r := rand.New(rand.NewChaCha8([32]byte{seed}))
	f := &fixture{}
	var list []pageindex.Chunk
	for range chunks {
		n := 1 + r.IntN(8)
		p := make([]byte, n*pageindex.PageSize)
		for i := range p {
			p[i] = byte(r.IntN(4)) // compressible
		}
		frame, err := pageblob.Encode(nil, p)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, pageindex.Chunk{SHA256: sha256.Sum256(frame), Size: uint32(len(frame)), Pages: uint32(n)})
		f.raw = append(f.raw, frame...)
		f.pages = append(f.pages, p...)
	}
	var err error
	if f.blob, err = pageindex.NewBlob(digest.FromBytes(f.raw), list); err != nil {
		t.Fatal(err)
	}
	return f
}

// memory is a Source that counts how often each byte was asked for.
type memory struct {
	*fixture
	mu       sync.Mutex
	asked    map[int64]int // by offset of a chunk
	requests int
	order    []int64 // offsets of the requests
	gate     chan struct{}
	damage   atomic.Int32 // so many of the next answers are damaged
	fail     error
	avoided  string
}

func newSource(f *fixture) *memory { return &memory{fixture: f, asked: make(map[int64]int)} }

type stream struct{ io.Reader }

func (stream) Close() error { return nil }
func (stream) Host() string { return "here" }

func (m *memory) OpenRange(ctx context.Context, d digest.Digest, size, off, n int64, avoid string) (Stream, error) {
	m.mu.Lock()
	m.requests++
	m.order = append(m.order, off)
	if avoid != "" {
		m.avoided = avoid
	}
	for i := range m.blob.Chunks {
		if at := m.blob.Offset(i); at >= off && at < off+n {
			m.asked[at]++
		}
	}
	gate, fail := m.gate, m.fail
	m.mu.Unlock()
	if d != m.blob.Digest || size != int64(len(m.raw)) {
		return nil, fmt.Errorf("asked for %s of %d bytes", d, size)
	}
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if fail != nil {
		return nil, fail
	}
	p := m.raw[off : off+n]
	if m.damage.Add(-1) >= 0 {
		p = bytes.Clone(p)
		p[len(p)/2] ^= 0x40
	}
	return stream{bytes.NewReader(p)}, nil
}

func openStore(t testing.TB, opts Options) *Store {
	t.Helper()
	if opts.Dir == "" {
		opts.Dir = t.TempDir()
	}
	if opts.CacheSize == 0 {
		opts.CacheSize = 1 << 40
	}
	if opts.RequestSize == 0 {
		opts.RequestSize = 64 << 10
	}
	if opts.Parallel == 0 {
		opts.Parallel = 4
	}
	if opts.bootID == "" {
		opts.bootID = "boot-1"
	}
	s, err := Open(context.Background(), opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func acquire(t testing.TB, s *Store, f *fixture) *Blob {
	t.Helper()
	b, err := s.Acquire(&f.blob, nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func all(f *fixture) []int {
	out := make([]int, len(f.blob.Chunks))
	for i := range out {
		out[i] = i
	}
	return out
}

// check compares what a fault handler would see with the content.
func check(t testing.TB, b *Blob, f *fixture) {
	t.Helper()
	data, err := os.ReadFile(b.DataPath())
	if err != nil {
		t.Fatal(err)
	}
	present, err := os.ReadFile(b.PresentPath())
	if err != nil {
		t.Fatal(err)
	}
	for i := range f.blob.Chunks {
		if present[i/8]&(1<<(i%8)) == 0 {
			t.Fatalf("chunk %d is not present", i)
		}
	}
	if !bytes.Equal(data, f.pages) {
		t.Fatal("the data file has wrong bytes")
	}
}

// TestOnce: many fetchers that ask for overlapping chunks, waiting or not, make
// the store fetch each chunk once.
func TestOnce(t *testing.T) {
	f := newFixture(t, 1, 300)
	src := newSource(f)
	s := openStore(t, Options{})
	defer s.Close()
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			b, err := s.Acquire(&f.blob, nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer b.Release()
			r := rand.New(rand.NewPCG(uint64(i), 1))
			order := r.Perm(len(f.blob.Chunks))
			for len(order) > 0 {
				n := min(1+r.IntN(20), len(order))
				if err := b.Fetch(context.Background(), src, order[:n], Urgency(i%3)); err != nil {
					t.Error(err)
					return
				}
				for _, c := range order[:n] {
					if !b.Present(c) {
						t.Errorf("chunk %d is not there after Fetch", c)
					}
				}
				order = order[n:]
			}
		})
	}
	wg.Wait()
	for at, n := range src.asked {
		if n != 1 {
			t.Errorf("chunk at %d was fetched %d times", at, n)
		}
	}
	b := acquire(t, s, f)
	defer b.Release()
	check(t, b, f)
	if got := s.Stats(); got.Chunks != int64(len(f.blob.Chunks)) || got.Hits == 0 {
		t.Errorf("%+v", got)
	}
}

// TestCoalesced: neighbours go into few requests of a bounded size.
func TestCoalesced(t *testing.T) {
	f := newFixture(t, 2, 200)
	src := newSource(f)
	s := openStore(t, Options{Parallel: 1})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	if err := b.Fetch(t.Context(), src, all(f), Demand); err != nil {
		t.Fatal(err)
	}
	least := int(f.blob.Size()/s.opts.RequestSize) + 1
	if src.requests < least || src.requests > least*3/2 {
		t.Fatalf("%d requests for %d bytes, at least %d are needed", src.requests, f.blob.Size(), least)
	}
	check(t, b, f)
}

// TestDemandFirst: what a process waits for overtakes the background, and is
// taken out of it.
func TestDemandFirst(t *testing.T) {
	f := newFixture(t, 3, 100)
	src := newSource(f)
	src.gate = make(chan struct{})
	s := openStore(t, Options{Parallel: 1, RequestSize: 64 << 10})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	filled := make(chan error, 1)
	go func() { filled <- b.Fill(context.Background(), src) }()
	src.gate <- struct{}{} // the first background request is out
	wanted := len(f.blob.Chunks) - 1
	got := make(chan error, 1)
	go func() { got <- b.Fetch(context.Background(), src, []int{wanted}, Demand) }()
	// The one worker is held up, so the next request that starts is ours.
	for {
		s.mu.Lock()
		w := b.wants[wanted]
		asked := w != nil && w.urgency == Demand
		s.mu.Unlock()
		if asked {
			break
		}
		runtime.Gosched()
	}
	close(src.gate)
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	if err := <-filled; err != nil {
		t.Fatal(err)
	}
	check(t, b, f)
	for at, n := range src.asked {
		if n != 1 {
			t.Errorf("chunk at %d was fetched %d times", at, n)
		}
	}
}

// TestSchedule looks at the scheduler alone.
func TestSchedule(t *testing.T) {
	f := newFixture(t, 4, 10)
	opts := &Options{Parallel: 4, RequestSize: 1 << 20, Quiet: time.Second, BackgroundRate: 1}
	b := &Blob{index: f.blob, wants: map[int]*want{}}
	q := &scheduler{}
	add := func(chunk int, u Urgency) *want {
		w := &want{blob: b, chunk: chunk, urgency: u, done: make(chan struct{})}
		b.wants[chunk] = w
		q.add(w)
		return w
	}
	now := time.Unix(1000, 0)
	add(0, Background)
	late := add(5, Background)
	add(9, Demand)
	d, _ := q.take(now, opts)
	if d == nil || d.urgency != Demand || d.wants[0].chunk != 9 {
		t.Fatalf("%+v", d)
	}
	if bg, wait := q.take(now, opts); bg != nil || wait != 0 {
		t.Fatal("background runs while a process waits")
	}
	q.end(d, now)
	if bg, wait := q.take(now.Add(time.Millisecond), opts); bg != nil || wait != 999*time.Millisecond {
		t.Fatalf("background does not keep quiet: %v %s", bg, wait)
	}
	late.urgency = Demand
	q.add(late)
	if p, _ := q.take(now, opts); p == nil || p.wants[0] != late {
		t.Fatal("promoted chunk is not next")
	} else {
		q.end(p, now)
	}
	bg, _ := q.take(now.Add(2*time.Second), opts)
	if bg == nil || bg.urgency != Background || bg.wants[0].chunk != 0 {
		t.Fatalf("%+v", bg)
	}
	add(1, Background)
	if next, wait := q.take(now.Add(2*time.Second), opts); next != nil || wait <= 0 {
		t.Fatal("rate limit is ignored")
	}
}

// TestScheduleSoon looks at how the scheduler treats what is needed soon.
func TestScheduleSoon(t *testing.T) {
	f := newFixture(t, 14, 20)
	opts := &Options{Parallel: 8, RequestSize: 1 << 20}
	b := &Blob{index: f.blob, wants: map[int]*want{}}
	q := &scheduler{}
	add := func(u Urgency, chunks ...int) {
		for _, c := range chunks {
			w := &want{blob: b, chunk: c, urgency: u, done: make(chan struct{})}
			b.wants[c] = w
			q.add(w)
		}
	}
	now := time.Unix(1000, 0)
	take := func(u Urgency, chunks ...int) *task {
		t.Helper()
		got, _ := q.take(now, opts)
		if got == nil || got.urgency != u {
			t.Fatalf("%+v instead of %v with urgency %d", got, chunks, u)
		}
		var list []int
		for _, w := range got.wants {
			list = append(list, w.chunk)
		}
		if !slices.Equal(list, chunks) {
			t.Fatalf("chunks %v instead of %v", list, chunks)
		}
		return got
	}
	add(Background, 0, 8)
	add(Soon, 12, 11, 10, 13, 7, 3, 5, 16, 18)
	add(Demand, 1)
	wait := take(Demand, 1)
	first := take(Soon, 10, 11, 12, 13) // neighbours in one request, whatever their order
	take(Soon, 7)                       // not the background's neighbour
	take(Soon, 3)
	if next, _ := q.take(now, opts); next != nil {
		t.Fatalf("%+v begins while a process waits", next)
	}
	b.wants[16].urgency = Demand // it was touched
	q.add(b.wants[16])
	q.end(wait, now)
	wait = take(Demand, 16)
	q.end(wait, now)
	take(Soon, 5)
	take(Soon, 18)
	if next, _ := q.take(now, opts); next != nil {
		t.Fatalf("%+v begins before what is needed soon is there", next)
	}
	q.end(first, now)
	for range 4 {
		q.end(&task{urgency: Soon}, now)
	}
	take(Background, 0)
}

// TestPrefetch: what is prefetched is there, is fetched once, and is no hit of the cache.
func TestPrefetch(t *testing.T) {
	f := newFixture(t, 15, 60)
	src := newSource(f)
	s := openStore(t, Options{})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	for range 2 {
		wait, err := b.Prefetch(t.Context(), src, []int{40, 7, 6, 5, 4, 41})
		if err != nil {
			t.Fatal(err)
		}
		if err := wait(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range f.blob.Chunks {
		if want := i >= 4 && i <= 7 || i == 40 || i == 41; b.Present(i) != want {
			t.Errorf("chunk %d is there: %v", i, !want)
		}
	}
	if st := s.Stats(); st.Requests > 4 || st.Chunks != 6 || st.Hits != 0 {
		t.Errorf("%+v", st)
	}
	if _, err := b.Prefetch(t.Context(), src, []int{60}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a chunk that is not there: %v", err)
	}
	// Given up in the middle: nothing stays queued.
	src.gate = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	wait, err := b.Prefetch(ctx, src, []int{10, 20, 30, 50, 55})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := wait(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	close(src.gate)
	if err := b.Fetch(t.Context(), src, []int{10, 20, 30, 50, 55}, Demand); err != nil {
		t.Fatal(err)
	}
}

// TestRestart: content of this boot is used again, that of another is not.
func TestRestart(t *testing.T) {
	f := newFixture(t, 5, 50)
	dir := t.TempDir()
	src := newSource(f)
	use := func(boot string) int {
		s := openStore(t, Options{Dir: dir, bootID: boot})
		defer s.Close()
		b := acquire(t, s, f)
		defer b.Release()
		before := src.requests
		if err := b.Fetch(t.Context(), src, all(f), Demand); err != nil {
			t.Fatal(err)
		}
		check(t, b, f)
		return src.requests - before
	}
	if use("boot-1") == 0 {
		t.Fatal("nothing was fetched")
	}
	if n := use("boot-1"); n != 0 {
		t.Fatalf("%d requests after a restart", n)
	}
	// A kill leaves half-made folders behind.
	if err := os.MkdirAll(filepath.Join(dir, ".tmp-1", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if use("boot-2") == 0 {
		t.Fatal("content of another boot was trusted")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".tmp-*")); len(left) != 0 {
		t.Fatalf("left: %v", left)
	}
}

func isOpen(s *Store, b *Blob) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.folders[b.key()].open != nil
}

// TestDamagedFolder: a folder that is not whole is made anew.
func TestDamagedFolder(t *testing.T) {
	f := newFixture(t, 6, 20)
	for name, damage := range map[string]func(dir string) error{
		"short data": func(dir string) error { return os.Truncate(filepath.Join(dir, "data"), 4096) },
		"no bitmap":  func(dir string) error { return os.Remove(filepath.Join(dir, "present")) },
		"no boot":    func(dir string) error { return os.Remove(filepath.Join(dir, "boot")) },
		"gone":       os.RemoveAll,
		"data is a dir": func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "data")), os.Mkdir(filepath.Join(dir, "data"), 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Options{})
			defer s.Close()
			src := newSource(f)
			b := acquire(t, s, f)
			if err := b.Fetch(t.Context(), src, all(f), Demand); err != nil {
				t.Fatal(err)
			}
			b.Release()
			for isOpen(s, b) { // for the request, which may still be ending
				runtime.Gosched()
			}
			if err := damage(b.dir); err != nil {
				t.Fatal(err)
			}
			b = acquire(t, s, f)
			defer b.Release()
			if err := b.Fetch(t.Context(), src, all(f), Demand); err != nil {
				t.Fatal(err)
			}
			check(t, b, f)
			if s.Stats().Bytes != int64(len(f.pages)) {
				t.Errorf("store says %d bytes, has %d", s.Stats().Bytes, len(f.pages))
			}
		})
	}
}

func TestDamagedChunk(t *testing.T) {
	f := newFixture(t, 7, 5)
	src := newSource(f)
	src.damage.Store(1)
	s := openStore(t, Options{})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	if err := b.Fetch(t.Context(), src, all(f), Demand); err != nil {
		t.Fatal(err)
	}
	check(t, b, f)
	if src.avoided != "here" || s.Stats().Damaged != 1 {
		t.Fatalf("avoided %q, %+v", src.avoided, s.Stats())
	}
	g := newFixture(t, 8, 1)
	bad := newSource(g)
	bad.damage.Store(1 << 30)
	b2 := acquire(t, s, g)
	defer b2.Release()
	if err := b2.Fetch(t.Context(), bad, all(g), Demand); !errdefs.IsDataLoss(err) || !errors.Is(err, pageblob.ErrDamaged) {
		t.Fatalf("got %v", err)
	}
	if b2.Present(0) {
		t.Fatal("a damaged chunk is marked present")
	}
}

// TestSourceFails: a failure is nobody else's: another source still works.
func TestSourceFails(t *testing.T) {
	f := newFixture(t, 9, 3)
	bad, good := newSource(f), newSource(f)
	bad.fail = errdefs.ErrNotFound
	bad.gate = make(chan struct{})
	s := openStore(t, Options{})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	first := make(chan error, 1)
	go func() { first <- b.Fetch(context.Background(), bad, []int{0}, Demand) }()
	bad.gate <- struct{}{}
	if err := <-first; !errdefs.IsNotFound(err) {
		t.Fatalf("got %v", err)
	}
	if err := b.Fetch(t.Context(), good, all(f), Demand); err != nil {
		t.Fatal(err)
	}
	check(t, b, f)
}

// TestFailedBefore: who asks for a chunk while an earlier request for it fails is given a request of his own, and no more.
func TestFailedBefore(t *testing.T) {
	f := newFixture(t, 7, 1)
	src := newSource(f)
	src.gate, src.fail = make(chan struct{}), errors.New("the registry was down")
	s := openStore(t, Options{})
	defer s.Close()
	b := acquire(t, s, f)
	defer b.Release()
	asked := func(n int) { // waits for a request
		for pace := time.Tick(time.Millisecond); ; <-pace {
			src.mu.Lock()
			got := src.requests
			src.mu.Unlock()
			if got == n {
				return
			}
		}
	}
	early, late := make(chan error, 1), make(chan error, 1)
	go func() { early <- b.Fetch(t.Context(), src, []int{0}, Background) }()
	asked(1)
	go func() { late <- b.Fetch(t.Context(), src, []int{0}, Demand) }()
	for pace := time.Tick(time.Millisecond); s.Stats().Shared == 0; {
		<-pace
	}
	src.mu.Lock()
	gate, fail := src.gate, src.fail
	src.gate, src.fail = nil, nil
	src.mu.Unlock()
	gate <- struct{}{}
	if err := <-early; !errors.Is(err, fail) {
		t.Errorf("the first: %v", err)
	}
	if err := <-late; err != nil {
		t.Errorf("the second: %v", err)
	}
	check(t, b, f)
}

func TestEviction(t *testing.T) {
	a, b, c := newFixture(t, 10, 20), newFixture(t, 11, 20), newFixture(t, 12, 20)
	s := openStore(t, Options{CacheSize: int64(len(a.pages) + len(b.pages) + 4096)})
	load := func(f *fixture) *Blob {
		blob := acquire(t, s, f)
		if err := blob.Fetch(t.Context(), newSource(f), all(f), Demand); err != nil {
			t.Fatal(err)
		}
		return blob
	}
	ba := load(a) // stays in use
	load(b).Release()
	bc := load(c)
	bc.Release()
	if _, err := os.Stat(ba.DataPath()); err != nil {
		t.Fatalf("a blob in use was evicted: %v", err)
	}
	check(t, ba, a)
	ba.Release()
	if err := s.Close(); err != nil { // waits for the workers, which evict
		t.Fatal(err)
	}
	if s.Stats().Bytes > s.opts.CacheSize || s.Stats().Evictions == 0 {
		t.Fatalf("%+v, limit %d", s.Stats(), s.opts.CacheSize)
	}
	if left, _ := filepath.Glob(filepath.Join(s.opts.Dir, ".tmp-*")); len(left) != 0 {
		t.Fatalf("left: %v", left)
	}
}

func TestCancelAndClose(t *testing.T) {
	f := newFixture(t, 13, 50)
	src := newSource(f)
	src.gate = make(chan struct{})
	s := openStore(t, Options{Parallel: 1})
	b := acquire(t, s, f)
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- b.Fetch(ctx, src, []int{0}, Demand) }()
	src.gate <- struct{}{}
	cancel()
	<-first
	if err := b.Fetch(ctx, src, []int{1}, Background); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- b.Fetch(t.Context(), src, all(f), Demand) }()
	src.gate <- struct{}{}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err == nil {
		t.Fatal("a fetch succeeded in a closed store")
	}
	if err := b.Fetch(t.Context(), src, []int{2}, Demand); !errdefs.IsAborted(err) {
		t.Fatalf("after close: %v", err)
	}
	if _, err := s.Acquire(&f.blob, nil); !errdefs.IsAborted(err) {
		t.Fatalf("after close: %v", err)
	}
}

func TestOneOwner(t *testing.T) {
	s := openStore(t, Options{})
	defer s.Close()
	if _, err := Open(t.Context(), s.opts); !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("got %v", err)
	}
}

func TestArguments(t *testing.T) {
	f := newFixture(t, 14, 2)
	s := openStore(t, Options{})
	defer s.Close()
	b := acquire(t, s, f)
	for _, c := range []int{-1, 2} {
		if err := b.Fetch(t.Context(), newSource(f), []int{c}, Demand); !errdefs.IsInvalidArgument(err) {
			t.Errorf("chunk %d: %v", c, err)
		}
	}
	b.Release()
	if err := b.Fetch(t.Context(), newSource(f), []int{0}, Demand); err == nil {
		t.Error("a released blob fetches")
	}
}
