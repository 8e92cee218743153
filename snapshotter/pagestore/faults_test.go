// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// mount mounts a tmpfs of a size on a new folder.
func mount(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func load(t *testing.T, s *Store, f *fixture) *Blob {
	t.Helper()
	b := acquire(t, s, f)
	if err := b.Fetch(t.Context(), newSource(f), all(f), Demand); err != nil {
		t.Fatal(err)
	}
	return b
}

// leave releases a blob and waits for requests that are still ending.
func leave(s *Store, b *Blob) {
	b.Release()
	for isOpen(s, b) {
		runtime.Gosched()
	}
}

// TestFullDisk: on a full disk blobs go in the order of their last use, no more than are needed; when all are in use,
// the error says so.
func TestFullDisk(t *testing.T) {
	var f []*fixture
	for i := range 8 {
		f = append(f, newFixture(t, byte(30+i), 50)) // about 900 KiB each
	}
	s := openStore(t, Options{Dir: mount(t, "4m")})
	defer s.Close()
	for i := range 3 {
		leave(s, load(t, s, f[i]))
	}
	leave(s, load(t, s, f[0])) // so that 1 is the oldest
	b3, b4 := load(t, s, f[3]), load(t, s, f[4])
	check(t, b3, f[3])
	check(t, b4, f[4])
	there := func(i int) bool {
		_, err := os.Stat(filepath.Join(s.opts.Dir, f[i].blob.Key()))
		return err == nil
	}
	if there(1) || !there(0) {
		t.Errorf("evicted: the oldest %v, the one that was used last %v", !there(1), !there(0))
	}
	// Room for two more when all that is unused goes.
	b5 := load(t, s, f[5])
	check(t, b5, f[5])
	var err error
	var used []*Blob
	for _, i := range []int{6, 7} {
		var b *Blob
		if b, err = s.Acquire(&f[i].blob, nil); err != nil {
			break
		}
		used = append(used, b)
		if err = b.Fetch(t.Context(), newSource(f[i]), all(f[i]), Demand); err != nil {
			break
		}
	}
	if !errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "free some space") {
		t.Errorf("on a disk full of what is in use: %v", err)
	}
	for i, b := range map[int]*Blob{3: b3, 4: b4, 5: b5} {
		check(t, b, f[i])
		b.Release()
	}
	for _, b := range used {
		b.Release()
	}
}

// TestFullDiskAtTheStart: a folder can be made on a disk that others have filled to the last block.
func TestFullDiskAtTheStart(t *testing.T) {
	a, b := newFixture(t, 40, 50), newFixture(t, 41, 30)
	s := openStore(t, Options{Dir: mount(t, "2m")})
	defer s.Close()
	leave(s, load(t, s, a))
	fill := func(name string) {
		if err := os.WriteFile(filepath.Join(s.opts.Dir, name), make([]byte, 4<<20), 0o600); err == nil {
			t.Fatal("the disk is not full")
		}
	}
	fill("one")
	bb := load(t, s, b)
	check(t, bb, b)
	fill("two")
	if _, err := s.Acquire(&a.blob, nil); !errdefs.IsResourceExhausted(err) {
		t.Errorf("no block is left and nothing to evict: %v", err)
	}
	bb.Release()
}

// TestDamagedInUse: what happens to the files of a blob that is in use is found out by who acquires or writes it next. The
// next gets new files; who has the old ones goes on with them or fails, but sees no wrong byte.
func TestDamagedInUse(t *testing.T) {
	for name, damage := range map[string]func(b *Blob) error{
		"short data":    func(b *Blob) error { return os.Truncate(b.DataPath(), pageindex.PageSize) },
		"a bit shorter": func(b *Blob) error { return os.Truncate(b.DataPath(), b.size-100) },
		"no data":       func(b *Blob) error { return os.Remove(b.DataPath()) },
		"no bitmap":     func(b *Blob) error { return os.Remove(b.PresentPath()) },
		"condemned":     func(b *Blob) error { return os.Remove(filepath.Join(b.dir, "boot")) },
		"no folder":     func(b *Blob) error { return os.RemoveAll(b.dir) },
		"no store":      func(b *Blob) error { return os.RemoveAll(filepath.Dir(b.dir)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 50, 40)
			s := openStore(t, Options{})
			defer s.Close()
			old := acquire(t, s, f)
			defer old.Release()
			if err := old.Fetch(t.Context(), newSource(f), all(f)[:20], Demand); err != nil {
				t.Fatal(err)
			}
			if err := damage(old); err != nil {
				t.Fatal(err)
			}
			if err := old.Fetch(t.Context(), newSource(f), all(f)[20:], Demand); err == nil {
				p := make([]byte, len(f.pages))
				if err := old.ReadPages(0, p); err != nil || !bytes.Equal(p, f.pages) {
					t.Errorf("wrong pages: %v", err)
				}
			} else if !errdefs.IsDataLoss(err) {
				t.Error(err)
			}
			b := load(t, s, f)
			defer b.Release()
			if b == old {
				t.Fatal("the damaged blob was given out again")
			}
			check(t, b, f)
			if got, want := s.Stats().Bytes, int64(len(f.pages)); got != want {
				t.Errorf("the store says that it has %d bytes, it has %d", got, want)
			}
		})
	}
}

// TestDiskFails: pages that the disk refuses after they were written are never given out again, not even by the next run of
// the daemon. The disk is a loop device on a file system that is too small for it.
func TestDiskFails(t *testing.T) {
	backing := mount(t, "6m")
	image := filepath.Join(backing, "disk")
	for _, c := range [][]string{{"truncate", "-s", "64m", image}, {"mkfs.ext4", "-q", "-O", "^has_journal", image}} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", c[0], err, out)
		}
	}
	disk := t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop,errors=continue", image, disk).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v: %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("umount", disk).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	}()
	f := newFixture(t, 60, 400) // 7 MiB
	s := openStore(t, Options{Dir: disk})
	b := load(t, s, f)
	check(t, b, f) // it is in the kernel's cache
	unix.Sync()
	p := make([]byte, pageindex.PageSize)
	if err := b.ReadPages(0, p); !errdefs.IsDataLoss(err) {
		t.Errorf("read after the disk failed: %v", err)
	}
	if err := b.Fetch(t.Context(), newSource(f), all(f), Demand); err != nil {
		t.Errorf("nothing was to be fetched: %v", err)
	}
	again := acquire(t, s, f)
	if again == b || again.Present(0) {
		t.Error("damaged pages are given out again")
	}
	again.Release()
	b.Release()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestDiskFailedBefore: the daemon that noticed is gone, and the kernel tells of an error only once.
func TestDiskFailedBefore(t *testing.T) {
	f := newFixture(t, 61, 20)
	dir := t.TempDir()
	s := openStore(t, Options{Dir: dir})
	b := load(t, s, f)
	if err := os.Truncate(b.DataPath(), 0); err != nil { // found out as an error of the disk is
		t.Fatal(err)
	}
	if b.sound() == nil {
		t.Fatal("not found out")
	}
	if err := os.Truncate(b.DataPath(), b.size); err != nil {
		t.Fatal(err)
	}
	if b.sound() == nil {
		t.Error("forgotten")
	}
	b.Release()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, Options{Dir: dir})
	defer s.Close()
	b = load(t, s, f)
	defer b.Release()
	check(t, b, f)
}

// TestOutOfDescriptors: the store stays as it is when the process may open no more files.
func TestOutOfDescriptors(t *testing.T) {
	f := newFixture(t, 62, 20)
	dir := t.TempDir()
	s := openStore(t, Options{Dir: dir})
	leave(s, load(t, s, f))
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	scarcely := func(do func() error) error {
		t.Helper()
		low := limit
		low.Cur = 0
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
			t.Fatal(err)
		}
		err := do()
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		return err
	}
	err := scarcely(func() error {
		_, err := s.Acquire(&f.blob, nil)
		return err
	})
	if !scarce(err) {
		t.Errorf("got %v", err)
	}
	b := acquire(t, s, f)
	check(t, b, f)
	if err := scarcely(func() error {
		_, err := s.Acquire(&f.blob, nil)
		return err
	}); !scarce(err) {
		t.Errorf("got %v", err)
	}
	if again := acquire(t, s, f); again != b {
		t.Error("a blob in use was made anew")
	}
	check(t, b, f)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := scarcely(func() error { return s.scan(t.Context()) }); !scarce(err) {
		t.Errorf("scan: %v", err)
	}
	s = openStore(t, Options{Dir: dir})
	defer s.Close()
	b = acquire(t, s, f)
	defer b.Release()
	check(t, b, f)
}
