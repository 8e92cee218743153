// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/pagestore/pagefile"
)

// dropAfter is how many bytes are copied out of a mapping before its pages are
// unmapped again. They count as this process's resident memory although they are
// the page cache's; the next fault maps them anew, 64 KiB at a time.
const dropAfter = 2 << 20

// store is the mapped page store of one blob.
type store struct {
	blob    *pageindex.Blob
	files   Store
	file    *os.File // what data maps, open since before it was; see pagefile
	data    []byte
	bitmap  []byte // its length is a multiple of 4
	lo, hi  uint64 // bytes of data used since they were last dropped
	pending uint64
}

func openStore(files Store, b *pageindex.Blob) (*store, error) {
	s := &store{blob: b, files: files}
	if b.Pages() == 0 {
		return s, nil
	}
	// Both from one folder: between two looks for its name there may be another, whose bitmap says nothing of this one's pages.
	dir, err := os.OpenRoot(filepath.Dir(files.Data))
	if err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	defer dir.Close()
	if s.file, s.data, err = mapFile(dir, files.Data, b.Pages()*pageSize, 1); err != nil {
		return nil, err
	}
	var bitmap *os.File
	if bitmap, s.bitmap, err = mapFile(dir, files.Present, (uint64(len(b.Chunks))+7)/8, 4); err != nil {
		s.close()
		return nil, err
	}
	bitmap.Close()
	return s, nil
}

// reopen takes the files that the daemon has made in the place of those that are mapped, which were removed or
// were found damaged.
func (s *store) reopen() error {
	next, err := openStore(s.files, s.blob)
	if err != nil {
		return err
	}
	s.close()
	*s = *next
	return nil
}

// sound returns an error if pages that are read through the mapping may be others than were written. It is asked before
// each copy: the kernel would have to fail to write a page and to drop it between the two to give a wrong one.
func (s *store) sound() error {
	err := pagefile.Sound(s.file, int64(len(s.data)))
	if err == nil {
		return nil
	}
	if rerr := pagefile.Condemn(s.files.Data); rerr != nil {
		return fmt.Errorf("%w: %w", err, rerr)
	}
	return err
}

// maps tells whether an address is in a mapping.
func (s *store) maps(address uintptr) bool {
	for _, m := range [][]byte{s.data, s.bitmap} {
		// The mapping goes on to the end of a page.
		if start := uintptr(unsafe.Pointer(unsafe.SliceData(m))); m != nil && address >= start && address-start < uintptr(len(m)+pageSize-1)&^(pageSize-1) {
			return true
		}
	}
	return false
}

// mapFile maps a file of a folder, of at least size bytes, read-only. The length of the
// mapping is rounded up to a multiple of align, which stays in the last page.
func mapFile(dir *os.Root, name string, size uint64, align int) (_ *os.File, _ []byte, err error) {
	f, err := dir.OpenFile(filepath.Base(name), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("page store: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("page store: %w", err)
	}
	if !st.Mode().IsRegular() || uint64(st.Size()) < size {
		return nil, nil, fmt.Errorf("page store: %s has %d bytes, %d are needed: remove its directory and restart thaw-snapshotter", name, st.Size(), size)
	}
	n := (int(size) + align - 1) / align * align
	m, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("page store: %w", &os.PathError{Op: "mmap", Path: name, Err: err})
	}
	return f, m, nil
}

// present tells whether a chunk may be read. It is ordered: what the daemon wrote
// before it set the bit is seen by reads after present.
func (s *store) present(chunk int) bool {
	word := atomic.LoadUint32((*uint32)(unsafe.Pointer(&s.bitmap[chunk/32*4])))
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], word)
	return b[chunk/8%4]>>(chunk%8)&1 == 1
}

// presentPages tells whether all chunks of pages may be read. What is not in the file reads as zeros: so this is asked once more for
// all that is copied, whoever found it there before.
func (s *store) presentPages(page, pages uint64) bool {
	for chunk := s.blob.ChunkOf(page); s.blob.FirstPage(chunk) < page+pages; chunk++ {
		if !s.present(chunk) {
			return false
		}
	}
	return true
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
	if s.file != nil {
		s.file.Close()
	}
}
