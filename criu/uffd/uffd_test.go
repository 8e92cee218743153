// SPDX-License-Identifier: Apache-2.0

package uffd

import (
	"bytes"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

const page = 4096

// open returns a userfaultfd without events: with them, the test itself would
// wait for ever in munmap.
func open(t *testing.T) FD {
	t.Helper()
	f, err := Open(0)
	if err != nil {
		t.Skipf("no userfaultfd here: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func memory(t *testing.T, pages int) (uint64, []byte) {
	t.Helper()
	m, err := unix.Mmap(-1, 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	return uint64(uintptr(unsafe.Pointer(&m[0]))), m
}

func descriptors(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestProbeLeaksNothing(t *testing.T) {
	before := descriptors(t)
	features, err := Probe()
	if err != nil {
		t.Skipf("no userfaultfd here: %v", err)
	}
	if features&FeatureEvents != FeatureEvents {
		t.Errorf("features %#x", features)
	}
	if _, err := Open(1 << 60); err != unix.EINVAL {
		t.Errorf("unknown feature: %v", err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestFill(t *testing.T) {
	f := open(t)
	dst, mem := memory(t, 8)
	src := bytes.Repeat([]byte{7}, 4*page)
	from := unsafe.Pointer(&src[0])

	if ok, err := f.Registered(dst, page); ok || err != nil {
		t.Errorf("Registered before: %v, %v", ok, err)
	}
	if _, err := f.Copy(dst, from, page); err != unix.ENOENT {
		t.Errorf("copy into unregistered memory: %v", err)
	}
	if err := f.Register(dst, 8*page); err != nil {
		t.Fatal(err)
	}
	if ok, err := f.Registered(dst, page); !ok || err != nil {
		t.Errorf("Registered: %v, %v", ok, err)
	}
	if ok, err := f.Registered(dst, 8*page); !ok || err != nil {
		t.Errorf("all of it: %v, %v", ok, err)
	}
	if ok, err := f.Registered(dst, 9*page); ok || err != nil {
		t.Errorf("more than it: %v, %v", ok, err)
	}
	if n, err := f.Copy(dst+2*page, from, page); n != page || err != nil {
		t.Errorf("copy: %d, %v", n, err)
	}
	if n, err := f.Copy(dst+2*page, from, page); n != 0 || err != unix.EEXIST {
		t.Errorf("copy again: %d, %v", n, err)
	}
	// Stops in front of the page that is there, and counts what it did.
	if n, err := f.Copy(dst, from, 4*page); n != 2*page || err != nil {
		t.Errorf("copy over a present page: %d, %v", n, err)
	}
	if n, err := f.Zero(dst+3*page, 4*page); n != 4*page || err != nil {
		t.Errorf("zero: %d, %v", n, err)
	}
	if n, err := f.Copy(dst+7*page, from, 2*page); n != 0 || err != unix.ENOENT {
		t.Errorf("copy over the mapping's end: %d, %v", n, err)
	}
	unreadable, err := unix.Mmap(-1, 0, page, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(unreadable)
	if _, err := f.Copy(dst+7*page, unsafe.Pointer(unsafe.SliceData(unreadable)), page); err != unix.EFAULT {
		t.Errorf("copy from nowhere: %v", err)
	}
	if _, err := f.Poison(dst+7*page, page); err != nil && err != unix.EINVAL {
		t.Errorf("poison: %v", err)
	}
	if f.Changing() || !f.Alive() {
		t.Errorf("changing %v, alive %v", f.Changing(), f.Alive())
	}
	want := append(bytes.Repeat([]byte{7}, 3*page), make([]byte, 4*page)...)
	if !bytes.Equal(mem[:7*page], want) {
		t.Error("content differs")
	}
	if err := f.Unregister(dst, 8*page); err != nil {
		t.Error(err)
	}
}

func TestFaultAndWake(t *testing.T) {
	f := open(t)
	dst, mem := memory(t, 1)
	if err := f.Register(dst, page); err != nil {
		t.Fatal(err)
	}
	var b Buffer
	if _, err := f.Read(&b); err != unix.EAGAIN {
		t.Fatalf("read of nothing: %v", err)
	}
	// A system call touches the page, because Go's garbage collector waits for a thread that faults in Go code.
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	wrote := make(chan error, 1)
	go func() {
		_, err := unix.Write(pipe[1], mem[5:6])
		wrote <- err
	}()
	next := func() Event {
		p := []unix.PollFd{{Fd: int32(f), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(p, -1); err != nil && err != unix.EINTR {
				t.Fatal(err)
			}
			n, err := f.Read(&b)
			if err == unix.EAGAIN {
				continue
			}
			if n != 1 || err != nil {
				t.Fatal(n, err)
			}
			return b.Event(0)
		}
	}
	if e := next(); e.Kind != Pagefault || e.Start != dst {
		t.Fatalf("%+v", e)
	}
	// Woken without its page the thread asks again.
	if err := f.Wake(dst, page); err != nil {
		t.Fatal(err)
	}
	if e := next(); e.Kind != Pagefault || e.Start != dst {
		t.Fatalf("%+v", e)
	}
	src := bytes.Repeat([]byte{9}, page)
	if _, err := f.Copy(dst, unsafe.Pointer(&src[0]), page); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1)
	if _, err := unix.Read(pipe[0], got); err != nil || got[0] != 9 {
		t.Errorf("read %d, %v", got, err)
	}
}
