// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/publish"
)

const (
	defaultMaxSize = 1 << 40
	// maxEntries bounds the entries of an archive.
	maxEntries = 1 << 16
	// reserve is left free on the disk that is unpacked to, in bytes.
	reserve = 64 << 20
)

// unpack writes the files of an archive that a checkpoint is made of to dir.
func unpack(ctx context.Context, r io.Reader, dir string, maxSize int64) error {
	if maxSize <= 0 {
		maxSize = defaultMaxSize
	}
	if err := os.Mkdir(filepath.Join(dir, imagesDir), 0o700); err != nil {
		return err
	}
	plain, err := publish.Decompressed(r)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	defer plain.Close()
	tr := tar.NewReader(plain)
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrFormat, err)
		}
		if n == maxEntries {
			return fmt.Errorf("%w: it has more than %d entries", ErrFormat, maxEntries)
		}
		name, err := destination(h)
		if err != nil {
			return err
		}
		// What is not needed counts too: it must be decompressed to find what is behind it.
		if h.Size > maxSize {
			return fmt.Errorf("%w: it unpacks to more than allowed: with %d bytes, %.100q is more than allowed", ErrFormat, h.Size, h.Name)
		}
		maxSize -= h.Size
		if name == "" {
			continue
		}
		if err := room(dir, h.Size); err != nil {
			return err
		}
		if err := writeFile(filepath.Join(dir, name), tr, h.Size); err != nil {
			return err
		}
	}
}

// destination is where an entry goes below the folder, or "" for what is not
// needed.
func destination(h *tar.Header) (string, error) {
	name := strings.TrimPrefix(h.Name, "./")
	if clean := path.Clean(name); path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../") || strings.Contains(name, "/../") {
		return "", fmt.Errorf("%w: it has the file name %.100q", ErrFormat, h.Name)
	}
	name = path.Clean(name)
	inImages := path.Dir(name) == imagesDir
	wanted := inImages
	switch name {
	case configDump, specDump, rootfsDiff, deletedList, dumpLog:
		wanted = true
	case "devshm-checkpoint.tar":
		log.L.Warn("the archive holds the content of /dev/shm, which the restored container will not have")
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return "", nil
	case tar.TypeReg, tar.TypeGNUSparse:
	default:
		if !wanted {
			return "", nil
		}
		return "", fmt.Errorf("%w: %.100q is no regular file", ErrFormat, h.Name)
	}
	if !wanted {
		return "", nil
	}
	if h.Size < 0 {
		return "", fmt.Errorf("%w: %.100q has %d bytes", ErrFormat, h.Name, h.Size)
	}
	return name, nil
}

// room checks that the disk has room for a file.
func room(dir string, size int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	if free := int64(st.Bavail) * st.Bsize; size > free-reserve {
		return fmt.Errorf("no room in %s: %d MiB are needed, %d are left: name another folder with --temp-dir", filepath.Dir(dir), size>>20, free>>20)
	}
	return nil
}

func writeFile(name string, r io.Reader, size int64) (err error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%w: it has %s twice", ErrFormat, filepath.Base(name))
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.CopyN(f, r, size); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrFormat, filepath.Base(name), err)
	}
	return nil
}
