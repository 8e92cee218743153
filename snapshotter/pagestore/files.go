// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/pagestore/pagefile"
)

// files are the files of a blob's folder. The bitmap is written, not mapped: a disk that fails is an
// error then and not a fatal signal.
type files struct {
	dir    string
	boot   []byte // what the boot file must hold
	size   int64  // of the data, in bytes
	chunks int

	data, bitmap *os.File

	mu      sync.Mutex // of changes to the bitmap
	present []uint32   // atomic; bit i%32 of word i/32, which is the file's order on little-endian machines
	damage  error      // what sound has found
}

// bitmapSize is a whole number of pages, so that fault handlers can map whole words.
func (f *files) bitmapSize() int64 {
	n := (int64(f.chunks) + 7) / 8
	return max((n+pageindex.PageSize-1)/pageindex.PageSize, 1) * pageindex.PageSize
}

// create makes the folder in the store's, whole or not at all.
func (f *files) create(store string) error {
	if err := os.MkdirAll(store, 0o700); err != nil { // removed under a daemon that runs
		return err
	}
	tmp, err := os.MkdirTemp(store, tmpPrefix) // mode 0700
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := createSized(filepath.Join(tmp, "data"), f.size, false); err != nil {
		return err
	}
	// A fault handler that maps a bitmap which has no space would be killed by reading it on some filesystems.
	if err := createSized(filepath.Join(tmp, "present"), f.bitmapSize(), true); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, pagefile.BootFile), f.boot, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, f.dir)
}

func createSized(path string, size int64, allocate bool) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(size); err != nil || !allocate {
		return err
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return &os.PathError{Op: "fallocate", Path: path, Err: err}
	}
	return nil
}

var errStale = errors.New("stale or damaged")

// scarce reports whether an error is about what the daemon lacks and not about the file.
func scarce(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// current returns nil if a folder was made in this boot by this version.
func current(dir string, boot []byte) error {
	p, err := os.ReadFile(filepath.Join(dir, pagefile.BootFile))
	if err == nil && !bytes.Equal(p, boot) {
		err = errStale
	}
	return err
}

// open opens the folder's files. An error that is not scarce says that the folder is to be made anew.
func (f *files) open() (err error) {
	if err := current(f.dir, f.boot); err != nil {
		return err
	}
	if f.data, err = openSized(filepath.Join(f.dir, "data"), f.size); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if f.bitmap, err = openSized(filepath.Join(f.dir, "present"), f.bitmapSize()); err != nil {
		return err
	}
	p := make([]byte, f.bitmapSize())
	if _, err := io.ReadFull(f.bitmap, p); err != nil {
		return err
	}
	f.present = make([]uint32, len(p)/4)
	for i := range f.present {
		f.present[i] = binary.LittleEndian.Uint32(p[4*i:])
	}
	return f.sound()
}

func openSized(path string, size int64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (info.Size() != size || !info.Mode().IsRegular()) {
		err = errStale
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// close needs that nobody else uses the files.
func (f *files) close() {
	f.data.Close()
	if f.bitmap != nil {
		f.bitmap.Close()
	}
}

// sound returns nil if nothing is known against the data. Once it has returned an error, it always does.
func (f *files) sound() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.damage != nil {
		return f.damage
	}
	f.damage = pagefile.Sound(f.data, f.size)
	if f.damage == nil {
		return nil
	}
	if err := pagefile.Condemn(f.DataPath()); err != nil {
		return fmt.Errorf("%w: %w", f.damage, err)
	}
	return f.damage
}

// inPlace returns nil if the files are still where others look for them, and nobody has condemned them.
func (f *files) inPlace() error {
	for path, file := range map[string]*os.File{f.DataPath(): f.data, f.PresentPath(): f.bitmap} {
		there, err := os.Lstat(path)
		if err != nil {
			return err
		}
		mine, err := file.Stat()
		if err != nil {
			return err
		}
		if !os.SameFile(mine, there) {
			return fmt.Errorf("%s is another file: %w", path, errStale)
		}
	}
	return current(f.dir, f.boot)
}

// DataPath is the file with the pages; PresentPath is the bitmap.
func (f *files) DataPath() string { return filepath.Join(f.dir, "data") }

// PresentPath is the file with the bitmap.
func (f *files) PresentPath() string { return filepath.Join(f.dir, "present") }

// Present reports whether a chunk is there.
func (f *files) Present(chunk int) bool {
	return atomic.LoadUint32(&f.present[chunk/32])&(1<<(chunk%32)) != 0
}

// setPresent marks a chunk whose pages were written.
func (f *files) setPresent(chunk int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	word := &f.present[chunk/32]
	next := atomic.LoadUint32(word) | 1<<(chunk%32)
	var p [4]byte
	binary.LittleEndian.PutUint32(p[:], next)
	if _, err := f.bitmap.WriteAt(p[:], int64(chunk/32*4)); err != nil {
		return fmt.Errorf("page store: %w", err)
	}
	atomic.StoreUint32(word, next)
	return nil
}
