// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
)

const (
	// maxStateFiles bounds the files in a state.
	maxStateFiles = 1 << 16
	// maxWindow bounds the memory that decompressing a state takes.
	maxWindow = 64 << 20

	// Folders of a laid-out image.
	criuDir  = "criu"  // CRIU's images, complete
	eagerDir = "eager" // eager pages as they travel; gone when laid out
)

// unpackState unpacks a compressed state into root: CRIU's images into criuDir,
// the eager pages into eagerDir. The input's digest has been verified, but its
// content may be hostile: only regular files with names of CRIU images are
// made, each once, no more than limit bytes in all. Errors about the content wrap
// checkpoint.ErrFormat.
func unpackState(in io.Reader, root *os.Root, limit int64) error {
	z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	defer z.Close()
	for _, dir := range []string{criuDir, eagerDir} {
		if err := root.Mkdir(dir, 0o700); err != nil {
			return fmt.Errorf("state: %w", err)
		}
	}
	content := &decompressed{z: z}
	t := tar.NewReader(content)
	var budget image.Budget
	last := ""
	for files := 0; ; files++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return atEnd(content)
		}
		if err != nil {
			return fmt.Errorf("%w: state, behind %.80q: %w", checkpoint.ErrFormat, last, err)
		}
		last = h.Name
		if files >= maxStateFiles {
			return fmt.Errorf("%w: state has more than %d files", checkpoint.ErrFormat, maxStateFiles)
		}
		if limit -= h.Size; limit < 0 {
			return fmt.Errorf("%w: state unpacks to more than limits.max_state allows", checkpoint.ErrFormat)
		}
		if err := budget.Take(h.Name, h.Size); err != nil {
			return fmt.Errorf("%w: state: %w", checkpoint.ErrFormat, err)
		}
		if err := unpackFile(h, t, root); err != nil {
			if content.failed != nil || errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = fmt.Errorf("%w: state, in %.80q: %w", checkpoint.ErrFormat, h.Name, err)
			}
			return err
		}
	}
}

// decompressed is what a state decompresses to. That it cannot be is the state's fault.
type decompressed struct {
	z      *zstd.Decoder
	failed error
}

func (d *decompressed) Read(p []byte) (int, error) {
	n, err := d.z.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		d.failed = err
	}
	return n, err
}

// maxPadding bounds the zeros behind an archive, with which programs fill its last block.
const maxPadding = 1 << 20

// atEnd returns nil if nothing but padding follows.
func atEnd(in io.Reader) error {
	buf := make([]byte, 32<<10)
	for total := 0; ; {
		n, err := in.Read(buf)
		if more := bytes.Trim(buf[:n], "\x00"); len(more) > 0 {
			return fmt.Errorf("%w: state goes on behind its end: %.16q", checkpoint.ErrFormat, more)
		}
		if total += n; total > maxPadding {
			return fmt.Errorf("%w: state has more than %d zeros behind its end", checkpoint.ErrFormat, maxPadding)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: state, behind its end: %w", checkpoint.ErrFormat, err)
		}
	}
}

// sparse reports whether an archive says only partly what is in a file, so that few bytes of it
// unpack to many.
func sparse(h *tar.Header) bool {
	for name := range h.PAXRecords {
		if strings.HasPrefix(name, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func unpackFile(h *tar.Header, in io.Reader, root *os.Root) error {
	if h.Typeflag != tar.TypeReg || sparse(h) {
		return fmt.Errorf("%w: state holds %.80q, which is no regular file", checkpoint.ErrFormat, h.Name)
	}
	if h.Name == checkpoint.SpecFile {
		return nil // for people who export; a restore goes by the pod's own spec
	}
	dir := criuDir
	switch image.KindOf(h.Name) {
	case image.Unknown:
		return fmt.Errorf("%w: state holds %.80q, which is no CRIU image", checkpoint.ErrFormat, h.Name)
	case image.Diagnostic:
		return nil // nothing needs it
	case image.Pages:
		dir = eagerDir
	}
	f, err := root.OpenFile(filepath.Join(dir, h.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%w: state holds %.80q twice", checkpoint.ErrFormat, h.Name)
	}
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	_, err = io.Copy(f, in)
	return errors.Join(err, f.Close())
}

// expandPages makes the pages files that CRIU reads out of the eager pages, and
// removes the latter. Lazy pages become holes: CRIU reads none of them.
func expandPages(dir string) error {
	images, err := image.Open(filepath.Join(dir, criuDir))
	if err != nil {
		return err
	}
	defer images.Close()
	maps, err := images.Pagemaps()
	if err != nil {
		return err
	}
	for _, p := range maps {
		if err := expandOne(dir, p); err != nil {
			return err
		}
	}
	left, err := os.ReadDir(filepath.Join(dir, eagerDir))
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("%w: state holds %s, to which no pagemap refers", checkpoint.ErrFormat, left[0].Name())
	}
	return os.Remove(filepath.Join(dir, eagerDir))
}

func expandOne(dir string, p *image.Pagemap) (err error) {
	from, to := filepath.Join(dir, eagerDir, p.File()), filepath.Join(dir, criuDir, p.File())
	var src io.Reader = eof{}
	in, err := os.Open(from)
	switch {
	case err == nil:
		defer in.Close()
		src = in
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(p.ExpandEager(out, src), out.Close()); err != nil {
		return err
	}
	if in == nil {
		return nil
	}
	return os.Remove(from)
}

// eof is an empty file.
type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }
