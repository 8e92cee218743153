// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// dropAfter is how many bytes are copied out of a mapping before its pages are
// unmapped again. They count as this process's resident memory although they are
// the page cache's; the next fault maps them anew, 64 KiB at a time.
const dropAfter = 2 << 20

// store is the mapped page store of one blob.
type store struct {
	blob    *pageindex.Blob
	data    []byte
	bitmap  []byte // its length is a multiple of 4
	lo, hi  uint64 // bytes of data used since they were last dropped
	pending uint64
}

func openStore(files Store, b *pageindex.Blob) (*store, error) {
	s := &store{blob: b}
	if b.Pages() == 0 {
		return s, nil
	}
	var err error
	if s.data, err = mapFile(files.Data, b.Pages()*pageSize, 1); err != nil {
		return nil, err
	}
	if s.bitmap, err = mapFile(files.Present, (uint64(len(b.Chunks))+7)/8, 4); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// mapFile maps a file of at least size bytes read-only. The length of the
// mapping is rounded up to a multiple of align, which stays in the last page.
func mapFile(name string, size uint64, align int) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	if !st.Mode().IsRegular() || uint64(st.Size()) < size {
		return nil, fmt.Errorf("page store: %s has %d bytes, %d are needed: remove its directory and restart thaw-snapshotter", name, st.Size(), size)
	}
	n := (int(size) + align - 1) / align * align
	m, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("page store: %w", &os.PathError{Op: "mmap", Path: name, Err: err})
	}
	return m, nil
}

// present tells whether a chunk may be read. It is ordered: what the daemon wrote
// before it set the bit is seen by reads after present.
func (s *store) present(chunk int) bool {
	word := atomic.LoadUint32((*uint32)(unsafe.Pointer(&s.bitmap[chunk/32*4])))
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], word)
	return b[chunk/8%4]>>(chunk%8)&1 == 1
}

// at returns the memory of pages. They are mapped at once: the kernel copies without page faults, and where it meets one gives
// everything up to map 64 KiB and begins anew.
func (s *store) at(page, pages uint64) unsafe.Pointer {
	data := s.data[page*pageSize : (page+pages)*pageSize]
	if pages > 1 {
		_ = unix.Madvise(data, unix.MADV_POPULATE_READ) // before Linux 5.14 there is none
	}
	return unsafe.Pointer(unsafe.SliceData(data))
}

// used notes that pages were read through the mapping.
func (s *store) used(page, pages uint64) {
	lo, hi := page*pageSize, (page+pages)*pageSize
	if s.pending == 0 {
		s.lo, s.hi = lo, hi
	}
	s.lo, s.hi = min(s.lo, lo), max(s.hi, hi)
	s.pending += hi - lo
	if s.pending >= dropAfter {
		// Failing costs memory only.
		_ = unix.Madvise(s.data[s.lo:s.hi], unix.MADV_DONTNEED)
		s.pending = 0
	}
}

func (s *store) close() {
	for _, m := range [][]byte{s.data, s.bitmap} {
		if m != nil {
			_ = unix.Munmap(m) // fails for other slices only
		}
	}
}
