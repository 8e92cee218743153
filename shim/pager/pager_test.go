// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
	"thaw.dev/thaw/snapshotter/pageindex"
)

var (
	seeds     = flag.Int("seeds", 6, "seeds of the torture test")
	firstSeed = flag.Uint64("seed", 1, "first seed of the torture test")
)

// victimBase is where the victim's memory is: far from where the kernel maps
// anything by itself.
const victimBase = 0x100000000000

const testPID = 4711

// The checkpoint's content, as testdata/victim.c knows it.

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

func class(p uint64) uint64 { return mix(p>>2) % 8 }

func content(p uint64) []byte {
	out := make([]byte, 0, pageSize)
	for w := range uint64(pageSize / 8) {
		out = binary.LittleEndian.AppendUint64(out, mix(p*(pageSize/8)+w))
	}
	return out
}

// checkpoint is an index with page stores, of which no chunk is present.
type checkpoint struct {
	index  *pageindex.Index
	stores []Store
	data   [][]byte // uncompressed content of each blob

	mu      sync.Mutex
	files   []*os.File // data, present, data, present, …
	bits    [][]byte
	fetched map[Chunk]int
}

// makeCheckpoint lays pages out in chunks of chunkPages pages: in groups of
// four in random order, over two blobs. arena is how many pages apart the
// four shares of the pages lie, times four; 0: directly behind each other.
func makeCheckpoint(t testing.TB, pages uint64, chunkPages int, spread bool, seed uint64) *checkpoint {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 2))
	var groups []uint64
	for g := range pages / 4 {
		if class(g*4) > 1 {
			groups = append(groups, g)
		}
	}
	rnd.Shuffle(len(groups)/2, func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	c := &checkpoint{fetched: map[Chunk]int{}, data: make([][]byte, 2)}
	where := map[uint64]pageindex.Run{} // by group
	for i, g := range groups {
		b := i * 2 / len(groups)
		where[g] = pageindex.Run{Blob: b, Page: uint64(len(c.data[b])) / pageSize}
		for p := g * 4; p < g*4+4; p++ {
			c.data[b] = append(c.data[b], content(p)...)
		}
	}
	c.index = &pageindex.Index{}
	proc := pageindex.Process{PID: testPID}
	share := pages / 4
	for p := uint64(0); p < pages; p += 4 {
		at := uint64(victimBase) + p*pageSize
		if spread {
			at = victimBase + (p/share*4*share+p%share)*pageSize
		}
		switch run := where[p/4]; {
		case class(p) == 0:
			proc.Runs = append(proc.Runs, pageindex.Run{Start: at, Pages: 4, Blob: pageindex.Zero})
		case class(p) > 1:
			run.Start, run.Pages = at, 4
			proc.Runs = append(proc.Runs, run)
		}
	}
	c.index.Processes = []pageindex.Process{proc}
	c.finish(t, chunkPages)
	return c
}

// finish makes chunks and empty stores for the data.
func (c *checkpoint) finish(t testing.TB, chunkPages int) {
	t.Helper()
	dir := t.TempDir()
	for i, d := range c.data {
		var chunks []pageindex.Chunk
		for n := len(d) / pageSize; n > 0; n -= chunkPages {
			chunks = append(chunks, pageindex.Chunk{Size: 1, Pages: uint32(min(n, chunkPages))})
		}
		b, err := pageindex.NewBlob(digest.FromBytes(d), chunks)
		if err != nil {
			t.Fatal(err)
		}
		c.index.Blobs = append(c.index.Blobs, b)
		s := Store{filepath.Join(dir, fmt.Sprint("data", i)), filepath.Join(dir, fmt.Sprint("present", i))}
		bits := make([]byte, (len(chunks)+7)/8)
		for _, f := range []struct {
			name string
			size int
		}{{s.Data, len(d)}, {s.Present, len(bits)}} {
			file, err := os.Create(f.name)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { file.Close() })
			if err := file.Truncate(int64(f.size)); err != nil {
				t.Fatal(err)
			}
			c.files = append(c.files, file)
		}
		c.bits, c.stores = append(c.bits, bits), append(c.stores, s)
	}
	if _, err := c.index.Encode(); err != nil {
		t.Fatal(err)
	}
}

// put makes a chunk present.
func (c *checkpoint) put(k Chunk) error {
	b := &c.index.Blobs[k.Blob]
	lo, hi := b.FirstPage(int(k.Chunk))*pageSize, b.FirstPage(int(k.Chunk)+1)*pageSize
	if _, err := c.files[2*k.Blob].WriteAt(c.data[k.Blob][lo:hi], int64(lo)); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	bits := c.bits[k.Blob]
	bits[k.Chunk/8] |= 1 << (k.Chunk % 8)
	_, err := c.files[2*k.Blob+1].WriteAt(bits[k.Chunk/8:k.Chunk/8+1], int64(k.Chunk/8))
	return err
}

func (c *checkpoint) putAll(t testing.TB) {
	t.Helper()
	for b := range c.index.Blobs {
		for i := range c.index.Blobs[b].Chunks {
			if err := c.put(Chunk{uint32(b), uint32(i)}); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// slow is a Fetcher that takes up to delay for each chunk.
type slow struct {
	*checkpoint
	delay time.Duration
}

func (s slow) Fetch(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error {
	for _, i := range chunks {
		if s.delay > 0 {
			select {
			case <-time.After(rand.N(s.delay)):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		k := Chunk{blob, i}
		if err := s.put(k); err != nil {
			return err
		}
		if u == Ahead { // guesses overlap; whoever fetches fetches once
			continue
		}
		s.mu.Lock()
		s.fetched[k]++
		s.mu.Unlock()
	}
	return nil
}

// fetchFunc is a Fetcher.
type fetchFunc func(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error

func (f fetchFunc) Fetch(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error {
	return f(ctx, blob, chunks, u)
}

// victimPath builds the victim once.
var victimPath = sync.OnceValues(func() (string, error) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "victim")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "victim")
	out, err := exec.Command(cc, "-O2", "-Wall", "-Werror", "-o", path, "testdata/victim.c", "-lpthread").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := victimPath(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// victim is a running one, whose memory is served.
type victim struct {
	t      testing.TB
	cmd    *exec.Cmd
	sock   *os.File
	stdout bytes.Buffer
	stderr bytes.Buffer
	waited chan error
	fd     int
}

func startVictim(t testing.TB, pages uint64, scenario string, seed uint64, steps int) *victim {
	t.Helper()
	if _, err := uffd.Probe(); err != nil {
		t.Skipf("no userfaultfd with events here (%v): run as root", err)
	}
	path, err := victimPath()
	if err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip("no C compiler")
		}
		t.Fatal(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "victim")
	defer theirs.Close()
	v := &victim{t: t, sock: os.NewFile(uintptr(pair[0]), "test"), waited: make(chan error, 1)}
	v.cmd = exec.Command(path, strconv.FormatUint(victimBase, 10), strconv.FormatUint(pages, 10), scenario, strconv.FormatUint(seed, 10), strconv.Itoa(steps))
	v.cmd.ExtraFiles = []*os.File{theirs}
	v.cmd.Stdout, v.cmd.Stderr = &v.stdout, &v.stderr
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { v.waited <- v.cmd.Wait() }()
	t.Cleanup(func() {
		v.sock.Close()
		v.kill()
	})
	oob := make([]byte, unix.CmsgSpace(4))
	theirs.Close()
	n, oobn, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n != 1 {
		t.Fatalf("victim did not send its descriptor: %v, %v: %s", n, err, v.stderr.String())
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		t.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Fatal(err)
	}
	v.fd = fds[0]
	return v
}

// kill ends the victim and all its children.
func (v *victim) kill() {
	unix.Kill(-v.cmd.Process.Pid, unix.SIGKILL)
}

// run lets the victim go on and waits for its end.
func (v *victim) run(limit time.Duration) {
	v.t.Helper()
	v.start()
	v.await(limit)
}

func (v *victim) start() {
	v.t.Helper()
	if _, err := v.sock.Write([]byte{1}); err != nil {
		v.t.Fatal(err)
	}
}

func (v *victim) await(limit time.Duration) {
	v.t.Helper()
	select {
	case err := <-v.waited:
		if err != nil {
			v.t.Fatalf("victim: %v\n%s", err, v.stderr.String())
		}
	case <-time.After(limit):
		stacks := make([]byte, 1<<16)
		v.t.Fatalf("victim still runs after %v: a thread was forgotten\n%s\n%s", limit, v.stderr.String(), stacks[:runtime.Stack(stacks, true)])
	}
}

// startPager serves the victim; what is fatal fails the test.
func startPager(t testing.TB, c *checkpoint, f Fetcher, policy Policy, h Holder, v *victim) *Pager {
	t.Helper()
	p, err := New(Config{Index: c.index, Stores: c.stores, Fetcher: f, Policy: policy, Holder: h, OnFatal: func(err error) {
		t.Error(err)
		v.kill()
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		v.kill()
		p.Close()
	})
	if err := p.Add(testPID, v.fd); err != nil {
		t.Fatal(err)
	}
	p.Restored()
	return p
}

func descriptors(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestScenarios(t *testing.T) {
	for _, c := range []struct {
		scenario string
		pages    uint64
		steps    int
	}{
		{"read", 8192, 0},
		{"threads", 4096, 0},
		{"forks", 1024, 0},
		{"exits", 1024, 60},
	} {
		for _, policy := range []Policy{Lazy, Complete} {
			t.Run(fmt.Sprintf("%s/%s", c.scenario, policy), func(t *testing.T) {
				before, goroutines := descriptors(t), runtime.NumGoroutine()
				cp := makeCheckpoint(t, c.pages, 32, false, 1)
				v := startVictim(t, c.pages, c.scenario, 1, c.steps)
				p := startPager(t, cp, slow{cp, 3 * time.Millisecond}, policy, nil, v)
				v.run(time.Minute)
				s := p.Stats()
				t.Logf("%+v", s)
				if s.Faults == 0 || s.RemoteFaults == 0 || s.CopiedPages == 0 || s.FaultWaitP50 == 0 {
					t.Error("nothing was counted")
				}
				if len(p.WorkingSet()) == 0 {
					t.Error("no working set was recorded")
				}
				p.Close()
				for k, n := range cp.fetched {
					if n > 3 { // in the background, ahead of its touch, and for it
						t.Errorf("%+v was fetched %d times", k, n)
					}
				}
				v.sock.Close()
				for _, f := range cp.files {
					f.Close()
				}
				if n := descriptors(t); n > before { // what an earlier test left to the garbage collector may be gone
					t.Errorf("%d descriptors before, %d after", before, n)
				}
				for limit := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > goroutines; runtime.Gosched() {
					if time.Now().After(limit) {
						t.Fatalf("%d goroutines before, %d after", goroutines, runtime.NumGoroutine())
					}
				}
			})
		}
	}
}

// once are seeds that failed some day.
var once = []uint64{233, 1521, 1649, 1661, 1799, 1919, 3001}

func TestTorture(t *testing.T) {
	run := slices.Clone(once)
	for i := range *seeds {
		run = append(run, *firstSeed+uint64(i))
	}
	for _, seed := range run {
		policy := Lazy
		if seed%3 == 0 {
			policy = Complete
		}
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			const pages = 2048
			cp := makeCheckpoint(t, pages, 1<<(seed%6), true, seed)
			v := startVictim(t, pages, "torture", seed, 400)
			p := startPager(t, cp, slow{cp, 2 * time.Millisecond}, policy, nil, v)
			if seed%3 == 1 {
				all := chunksOf(cp, seed)
				p.Expect(all[:len(all)/2])
			}
			v.run(2 * time.Minute)
			t.Logf("%+v", p.Stats())
		})
	}
}

// A whole fill makes the process an ordinary one: nothing is left to serve.
func TestFill(t *testing.T) {
	const pages = 8192
	cp := makeCheckpoint(t, pages, 64, false, 1)
	v := startVictim(t, pages, "read", 1, 0)
	h := &holder{}
	p := startPager(t, cp, slow{cp, time.Millisecond}, Cached, h, v)
	if err := p.Fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := p.Stats()
	t.Logf("%+v", s)
	if s.State != "complete" || s.PagesPresent != s.PagesTotal || s.AddressSpaces != 0 {
		t.Error("not complete")
	}
	if h.held != 1 || h.forgotten != 1 {
		t.Errorf("%+v", h)
	}
	v.run(time.Minute)
	if n := p.Stats().Faults; n != 0 {
		t.Errorf("%d faults after everything was filled", n)
	}
}

// holder counts what it holds.
type holder struct {
	mu              sync.Mutex
	held, forgotten int
	has             map[uint64]bool
	away            chan struct{} // if not nil: nothing is held or forgotten until it is closed
}

func (h *holder) wait(ctx context.Context) error {
	if h.away == nil {
		return nil
	}
	select {
	case <-h.away:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (h *holder) Hold(ctx context.Context, id uint64, _ int) {
	if h.wait(ctx) != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held++
	if h.has == nil {
		h.has = map[uint64]bool{}
	}
	h.has[id] = true
}

func (h *holder) Forget(ctx context.Context, id uint64) {
	if h.wait(ctx) != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.has[id] {
		h.forgotten++
	}
	delete(h.has, id)
}

func TestHolderSeesEveryAddressSpace(t *testing.T) {
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	h := &holder{}
	v := startVictim(t, 1024, "forks", 1, 0)
	p := startPager(t, cp, slow{cp, 0}, Lazy, h, v)
	v.run(time.Minute)
	p.Close()
	// One that is dead before its turn comes is not handed over.
	if h.held < 10 || h.held > 1+3+9+27 || h.forgotten != h.held || len(h.has) != 0 {
		t.Errorf("%+v", h)
	}
}

// While the holder is away, processes are taken, faults are served and children run.
func TestHolderAway(t *testing.T) {
	before := descriptors(t)
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	h := &holder{away: make(chan struct{})}
	v := startVictim(t, 1024, "forks", 1, 0)
	p := startPager(t, cp, slow{cp, 0}, Lazy, h, v)
	v.run(time.Minute)
	if h.held != 0 {
		t.Errorf("%+v", h)
	}
	if s := p.Stats(); s.State == "failed" || s.Faults == 0 {
		t.Errorf("%+v", s)
	}
	p.Close() // although it still is
	v.sock.Close()
	for _, f := range cp.files {
		f.Close()
	}
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors before, %d after", before, n)
	}
}

// A complete process is served for as long as the holder has its
// descriptor: what it does to its memory waits for somebody who reads the event.
func TestServedUntilForgotten(t *testing.T) {
	const pages = 2048
	cp := makeCheckpoint(t, pages, 32, true, 1)
	cp.putAll(t)
	h := &holder{away: make(chan struct{})}
	v := startVictim(t, pages, "torture", 1, 300)
	p := startPager(t, cp, slow{cp, 0}, Complete, h, v)
	for limit := time.Now().Add(time.Minute); p.Stats().PagesPresent != p.Stats().PagesTotal; runtime.Gosched() {
		if time.Now().After(limit) {
			t.Fatalf("not complete: %+v", p.Stats())
		}
	}
	v.run(time.Minute)
	if h.forgotten != 0 {
		t.Errorf("%+v", h)
	}
	close(h.away)
	if err := p.Fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h.forgotten != h.held || len(h.has) != 0 {
		t.Errorf("%+v", h)
	}
}

// Dead address spaces are let go of without being asked for.
func TestForkStormIsBounded(t *testing.T) {
	const forks = 600
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	cp.putAll(t)
	before := descriptors(t)
	h := &watermark{t: t}
	v := startVictim(t, 1024, "exits", 1, forks)
	p := startPager(t, cp, slow{cp, 0}, Lazy, h, v)
	v.run(2 * time.Minute)
	p.Close()
	t.Logf("%d address spaces, at most %d descriptors", h.held, h.most)
	if h.held < forks/4 || h.most > before+100 {
		t.Errorf("%d address spaces, at most %d descriptors, %d before", h.held, h.most, before)
	}
}

type watermark struct {
	holder
	t    testing.TB
	most int
}

func (w *watermark) Hold(ctx context.Context, id uint64, fd int) {
	w.most = max(w.most, descriptors(w.t))
	w.holder.Hold(ctx, id, fd)
}

// fatal runs a victim to the point where the pager gives up, and checks that
// nobody sees a wrong page and all is released.
func fatal(t *testing.T, scenario string, f Fetcher, h Holder, cp *checkpoint) error {
	t.Helper()
	before := descriptors(t)
	v := startVictim(t, 1024, scenario, 1, 1)
	failed := make(chan error, 2)
	p, err := New(Config{Index: cp.index, Stores: cp.stores, Fetcher: f, Policy: Lazy, Holder: h, OnFatal: func(err error) { failed <- err }})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Add(testPID, v.fd); err != nil {
		t.Fatal(err)
	}
	p.Restored()
	v.start()
	select {
	case err = <-failed:
	case <-time.After(time.Minute):
		t.Fatal("not reported")
	}
	t.Log(err)
	if strings.Contains(err.Error(), "\n") {
		t.Error("more than a line")
	}
	if s := p.Stats(); s.State != "failed" {
		t.Errorf("%+v", s)
	}
	if e := p.Fill(t.Context()); e == nil || p.Add(testPID+1, -1) == nil {
		t.Error("goes on")
	}
	select {
	case <-v.waited:
		t.Errorf("the victim ended: it cannot have seen all its pages\n%s", v.stderr.String())
	default:
	}
	v.kill()
	<-v.waited
	p.Close()
	p.Close()
	v.sock.Close()
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors before, %d after", before, n)
	}
	return err
}

func TestFatal(t *testing.T) {
	gone := errors.New("registry.example: 503")
	t.Run("fetch fails", func(t *testing.T) {
		err := fatal(t, "read", fetchFunc(func(context.Context, uint32, []uint32, Urgency) error { return gone }), nil, makeCheckpoint(t, 1024, 32, false, 1))
		if !errors.Is(err, gone) {
			t.Error(err)
		}
	})
	t.Run("fetch lies", func(t *testing.T) {
		err := fatal(t, "read", fetchFunc(func(context.Context, uint32, []uint32, Urgency) error { return nil }), nil, makeCheckpoint(t, 1024, 32, false, 1))
		if !strings.Contains(err.Error(), "not marked") {
			t.Error(err)
		}
	})
}

// A process that is killed while it waits for chunks is no error, even when the
// fetching then fails.
func TestKilledWithFaultsOutstanding(t *testing.T) {
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	v := startVictim(t, 1024, "hang", 1, 0)
	asked := make(chan struct{}, 1000)
	release := make(chan struct{})
	f := fetchFunc(func(ctx context.Context, _ uint32, _ []uint32, _ Urgency) error {
		asked <- struct{}{}
		<-release
		return errors.New("too late")
	})
	p := startPager(t, cp, f, Lazy, nil, v)
	v.start()
	<-asked
	v.kill()
	<-v.waited
	close(release)
	p.fetches.wg.Wait()
	if s := p.Stats(); s.State == "failed" {
		t.Error("failed")
	}
}

// A thread that waits for a chunk goes on when another thread gives the memory
// up, although the chunk does not come.
func TestGiveUpWhileWaiting(t *testing.T) {
	cp := makeCheckpoint(t, 1024, 4, false, 1)
	v := startVictim(t, 1024, "giveup", 1, 0)
	asked, release := make(chan struct{}, 10), make(chan struct{})
	p := startPager(t, cp, fetchFunc(func(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error {
		asked <- struct{}{}
		select {
		case <-release:
			return slow{cp, 0}.Fetch(ctx, blob, chunks, u)
		case <-ctx.Done():
			return ctx.Err()
		}
	}), Lazy, nil, v)
	v.start()
	for range 3 {
		<-asked
		v.start()
	}
	if _, err := v.sock.Read(make([]byte, 1)); err != nil {
		t.Fatalf("%v: %s", err, v.stderr.String())
	}
	close(release)
	v.await(time.Minute)
	t.Logf("%+v", p.Stats())
}

// Close with requests under way: they are cancelled and waited for.
func TestCloseCancelsRequests(t *testing.T) {
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	v := startVictim(t, 1024, "hang", 1, 0)
	asked := make(chan struct{}, 1000)
	p := startPager(t, cp, fetchFunc(func(ctx context.Context, _ uint32, _ []uint32, _ Urgency) error {
		asked <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}), Lazy, nil, v)
	v.start()
	<-asked
	v.kill()
	<-v.waited
	p.Close()
}

func TestAddRefuses(t *testing.T) {
	cp := makeCheckpoint(t, 64, 8, false, 1)
	p, err := New(Config{Index: cp.index, Stores: cp.stores, Fetcher: slow{cp, 0}, Policy: Lazy})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Add(1, -1); err == nil {
		t.Error("unknown task added")
	}
	if _, err := New(Config{Index: cp.index, Stores: cp.stores[:1], Policy: Lazy}); err == nil {
		t.Error("too few stores accepted")
	}
	if _, err := New(Config{Index: cp.index, Stores: cp.stores, Policy: "eager"}); err == nil {
		t.Error("unknown policy accepted")
	}
	if err := cp.files[0].Truncate(10); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{Index: cp.index, Stores: cp.stores, Policy: Lazy}); err == nil {
		t.Error("short store accepted")
	}
}

// The handler sleeps while nothing happens.
func TestIdle(t *testing.T) {
	cp := makeCheckpoint(t, 1024, 32, false, 1)
	cp.putAll(t)
	v := startVictim(t, 1024, "read", 1, 0)
	startPager(t, cp, slow{cp, 0}, Lazy, nil, v)
	var a, b unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &a); err != nil {
		t.Fatal(err)
	}
	<-time.After(300 * time.Millisecond)
	if err := unix.Getrusage(unix.RUSAGE_SELF, &b); err != nil {
		t.Fatal(err)
	}
	if d := time.Duration(b.Utime.Nano() + b.Stime.Nano() - a.Utime.Nano() - a.Stime.Nano()); d > 20*time.Millisecond {
		t.Errorf("%v of CPU in 300 ms", d)
	}
}

// TestAroundFaults: a page that is touched alone is filled alone, and with the second one in a window all of it.
func TestAroundFaults(t *testing.T) {
	const pages, window = 8192, faultWindow / pageSize
	cp := makeCheckpoint(t, pages, window, false, 1)
	cp.putAll(t)
	copied := func(apart int) (copied, touched uint64) {
		v := startVictim(t, pages, "latency", 1, apart)
		p := startPager(t, cp, slow{cp, 0}, Lazy, nil, v)
		v.run(time.Minute)
		fmt.Sscan(v.stdout.String(), &touched)
		p.Close() // a thread goes on before its page is counted
		return p.Stats().CopiedPages, touched
	}
	if copied, touched := copied(2 * window); copied != touched {
		t.Errorf("%d pages copied for %d that are far apart", copied, touched)
	}
	if copied, touched := copied(window / 2); copied <= touched {
		t.Errorf("%d pages copied for %d in pairs", copied, touched)
	}
}

func TestTouches(t *testing.T) {
	var touched touches
	const window = faultWindow
	for i, c := range []struct {
		page uint64
		want bool
	}{
		{10 * window, false},
		{10*window + pageSize, true},
		{11 * window, true}, // a walk
		{13 * window, false},
		{(13 + uint64(len(touched))) * window, false},
		{13*window + pageSize, false}, // forgotten
		{0, false},
		{pageSize, true},
	} {
		if got := touched.around(c.page); got != c.want {
			t.Errorf("%d: fault at %#x: %v, want %v", i, c.page, got, c.want)
		}
	}
}

func BenchmarkFault(b *testing.B) {
	const pages = 65536
	cp := makeCheckpoint(b, pages, 64, false, 1)
	cp.putAll(b)
	for b.Loop() {
		v := startVictim(b, pages, "latency", 1, 16)
		p := startPager(b, cp, slow{cp, 0}, Lazy, nil, v)
		v.run(time.Minute)
		var n, p50, p99 float64
		fmt.Sscan(v.stdout.String(), &n, &p50, &p99)
		b.ReportMetric(p50, "p50-ns")
		b.ReportMetric(p99, "p99-ns")
		s := p.Stats()
		b.ReportMetric(float64(s.Ioctls)/float64(s.Faults), "ioctls/fault")
		b.ReportMetric(float64(s.FaultWaitP50), "handler-p50-ns")
		p.Close()
	}
}

func BenchmarkFillMemory(b *testing.B) {
	const pages = 65536
	cp := makeCheckpoint(b, pages, 64, false, 1)
	cp.putAll(b)
	n, _ := cp.index.Processes[0].Pages()
	b.SetBytes(int64(n) * pageSize)
	for b.Loop() {
		v := startVictim(b, pages, "read", 1, 0)
		p := startPager(b, cp, slow{cp, 0}, Lazy, nil, v)
		start := time.Now()
		if err := p.Fill(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(n*pageSize)/time.Since(start).Seconds()/1e9, "GB/s")
		v.run(time.Minute)
		p.Close()
	}
}
