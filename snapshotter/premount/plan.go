// SPDX-License-Identifier: Apache-2.0

package premount

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// maxArchive bounds an archive that is read, in bytes, unpacked. That of a tmpfs
// without content is far smaller.
const maxArchive = 8 << 20

// NewMount returns the tmpfs with what is in an archive of CRIU's (tar, gzip); ok is
// false if that is to be left to CRIU. Whether the archive may be unpacked at all is
// for others to say.
func NewMount(key, source, options string, readOnly bool, archive io.Reader) (_ *Mount, ok bool) {
	if !plainOptions(options) {
		return nil, false
	}
	z, err := gzip.NewReader(archive)
	if err != nil {
		return nil, false
	}
	m := &Mount{Key: key, Source: source, Options: options, ReadOnly: readOnly}
	limited := &io.LimitedReader{R: z, N: maxArchive}
	types := make(map[string]uint32)
	for r := tar.NewReader(limited); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) && limited.N > 0 {
			return m, len(m.Entries) > 0
		}
		if err != nil {
			return nil, false
		}
		e, ok := newEntry(h)
		if _, again := types[e.Path]; !ok || again || len(m.Entries) == maxEntries {
			return nil, false
		}
		// Below a directory that was there before it: never through a link.
		if first := len(m.Entries) == 0; first != (e.Path == ".") || !first && types[path.Dir(e.Path)] != unix.S_IFDIR {
			return nil, false
		}
		types[e.Path] = e.Type
		m.Entries = append(m.Entries, e)
	}
}

func newEntry(h *tar.Header) (e Entry, ok bool) {
	e = Entry{
		Path: path.Clean(h.Name), Mode: uint32(h.Mode) & 0o7777, UID: h.Uid, GID: h.Gid, Modified: h.ModTime,
	}
	if path.IsAbs(e.Path) || e.Path == ".." || strings.HasPrefix(e.Path, "../") || strings.ContainsRune(h.Name, 0) ||
		h.Uid < 0 || h.Gid < 0 || h.Uname != "" || h.Gname != "" {
		return e, false
	}
	switch h.Typeflag {
	case tar.TypeDir:
		e.Type = unix.S_IFDIR
	case tar.TypeReg:
		e.Type = unix.S_IFREG
		if h.Size != 0 {
			return e, false
		}
	case tar.TypeSymlink:
		e.Type, e.Target = unix.S_IFLNK, h.Linkname
	case tar.TypeFifo:
		e.Type = unix.S_IFIFO
	case tar.TypeChar, tar.TypeBlock:
		e.Type = unix.S_IFCHR
		if h.Typeflag == tar.TypeBlock {
			e.Type = unix.S_IFBLK
		}
		if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > 1<<12 || h.Devminor > 1<<20 {
			return e, false
		}
		e.Device = unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))
	default: // hard links: seldom
		return e, false
	}
	return e, true
}
