// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sort"

	"golang.org/x/sys/unix"
)

const (
	// maxFiles bounds the files in a directory of images: about ten for each
	// process and one for each of its threads.
	maxFiles = 1 << 16
	// maxMetadata bounds in bytes each file that is read into memory, should it
	// have grown since it was listed.
	maxMetadata = maxPagemaps
)

// Dir is a directory of images. Its methods may be called concurrently as long
// as nobody writes to the directory.
type Dir struct {
	dir   *os.File
	files []File // ascending by name
}

// File is one file in a directory of images.
type File struct {
	Name string
	Size int64 // in bytes
	Kind Kind  // what it is by its name; Unknown if CRIU writes no such file
}

// Open opens a directory of images. Everything in it must be a regular file:
// CRIU would follow a link (its link `parent` names a directory of earlier
// images), and none belongs to a complete checkpoint. The caller closes it.
func Open(path string) (*Dir, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open CRIU images: %w", err)
	}
	d := &Dir{dir: f}
	if err := d.list(); err != nil {
		f.Close()
		return nil, err
	}
	return d, nil
}

// Close releases the directory.
func (d *Dir) Close() error { return d.dir.Close() }

// Path is the directory's path as it was given to Open.
func (d *Dir) Path() string { return d.dir.Name() }

// Files returns all files in ascending order of their names.
func (d *Dir) Files() []File { return d.files }

func (d *Dir) list() error {
	entries, err := d.dir.ReadDir(maxFiles + 1)
	if err != nil && len(entries) == 0 {
		return fmt.Errorf("%w: no images in %s: %w", ErrFormat, d.Path(), err)
	}
	if len(entries) > maxFiles {
		return fmt.Errorf("%w: more than %d files in %s", ErrFormat, maxFiles, d.Path())
	}
	var budget Budget
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return fmt.Errorf("list CRIU images: %w", err)
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%w: %.80q is a %s, only regular files belong to a checkpoint", ErrFormat, e.Name(), typeName(info.Mode()))
		}
		if err := budget.Take(e.Name(), info.Size()); err != nil {
			return err
		}
		d.files = append(d.files, File{Name: e.Name(), Size: info.Size(), Kind: KindOf(e.Name())})
	}
	sort.Slice(d.files, func(i, j int) bool { return d.files[i].Name < d.files[j].Name })
	return nil
}

func typeName(m fs.FileMode) string {
	switch {
	case m&fs.ModeSymlink != 0:
		return "symbolic link"
	case m.IsDir():
		return "directory"
	}
	return "special file"
}

// Has reports whether the directory holds a file of that name.
func (d *Dir) Has(name string) bool {
	i := sort.Search(len(d.files), func(i int) bool { return d.files[i].Name >= name })
	return i < len(d.files) && d.files[i].Name == name
}

// Open opens a file of the directory for reading. The file is a regular file
// and is in the directory itself. A file that is missing is fs.ErrNotExist. The
// caller closes it.
func (d *Dir) Open(name string) (*os.File, error) {
	if !d.Has(name) { // also excludes separators and dots: no listed name has them
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	// O_NONBLOCK: a FIFO that took the file's place must not hang us.
	fd, err := unix.Openat(int(d.dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%w: %.80q is a %s", ErrFormat, name, typeName(info.Mode()))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// read returns the content of a file that is small enough to be metadata, nil
// if there is no such file.
func (d *Dir) read(name string) ([]byte, error) {
	f, err := d.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > maxMetadata {
		return nil, fmt.Errorf("%w: %s has %d bytes, over the limit of %d", ErrFormat, name, info.Size(), int64(maxMetadata))
	}
	return readFull(f, info.Size())
}
