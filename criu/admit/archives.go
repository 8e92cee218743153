// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"thaw.dev/thaw/criu/image"
)

// Bounds of the content of all tmpfs mounts together. CRIU unpacks them into
// memory, which counts as the container's.
const (
	maxArchiveSize    = 4 << 30
	maxArchiveEntries = 1 << 18
	maxArchiveLinks   = 16 << 20 // bytes in the paths of links, which are remembered
)

// archives checks the content of tmpfs mounts, which CRIU has the host's tar
// unpack as root.
func (c *check) archives() error {
	budget := int64(maxArchiveSize)
	if r := c.spec.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil && *r.Memory.Limit > 0 {
		budget = min(budget, *r.Memory.Limit)
	}
	most, entries := budget, maxArchiveEntries
	for _, f := range c.dir.Files() {
		if f.Kind != image.Archive {
			continue
		}
		if err := c.archive(f.Name, &budget, &entries, most); err != nil {
			return err
		}
	}
	return nil
}

// archive checks one archive. What it unpacks to is taken from the budget, which was most at first, its entries from left.
func (c *check) archive(file string, budget *int64, left *int, most int64) error {
	f, err := c.dir.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	damaged := func(err error) error { return fmt.Errorf("%w: %s: %w", image.ErrFormat, file, err) }
	z, err := gzip.NewReader(f)
	if err != nil {
		return damaged(err)
	}
	// The reader stops one byte behind the budget, so that the sum is known to be over.
	limited := &io.LimitedReader{R: z, N: *budget + 1}
	r := tar.NewReader(limited)
	links := make(map[string]bool)
	for ; ; *left-- {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if limited.N == 0 || *left == 0 {
			return fmt.Errorf("%w: tmpfs archives unpack to more than %d bytes or %d files", image.ErrFormat, most, maxArchiveEntries)
		}
		if err != nil {
			return damaged(err)
		}
		c.archived(file, h, links)
	}
	*budget = limited.N - 1
	return nil
}

// archived checks one entry. links are the symbolic links so far: nothing may be
// unpacked through one.
func (c *check) archived(file string, h *tar.Header, links map[string]bool) {
	name := path.Clean(h.Name)
	bad := func(what string) {
		c.refuse(Difference{
			Field: "tmpfs content", Image: fmt.Sprintf("%s (%s in %s)", what, quote(h.Name), file), Spec: "files inside the mount",
			Remedy: "make the checkpoint from a container without it",
		})
	}
	if len(name) >= maxPath {
		bad("a path that is too long")
		return
	}
	if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") || strings.ContainsRune(h.Name, 0) {
		bad("a path that leads out of it")
		return
	}
	if throughLink(name, links) {
		bad("a path through a link")
		return
	}
	if n, ok := h.PAXRecords["GNU.sparse.name"]; ok && n != h.Name {
		bad("a second name, " + quote(n)) // which tar would take
		return
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeFifo, tar.TypeGNUSparse:
	case tar.TypeSymlink:
		if c.linkBytes += len(name); c.linkBytes > maxArchiveLinks {
			bad("too many links")
			return
		}
		links[name], c.tmpfsLinks[name] = true, true
	case tar.TypeLink:
		if t := path.Clean(h.Linkname); path.IsAbs(t) || t == ".." || strings.HasPrefix(t, "../") {
			bad("a hard link that leads out of it")
		} else if throughLink(t, links) {
			bad("a hard link through a link")
		}
	case tar.TypeChar, tar.TypeBlock:
		if !c.deviceNumber(h) {
			bad(fmt.Sprintf("device %d:%d", h.Devmajor, h.Devminor))
		}
	default:
		bad(fmt.Sprintf("an entry of unknown type %q", h.Typeflag))
	}
}

// throughLink reports whether a clean relative path goes through one of the links.
func throughLink(p string, links map[string]bool) bool {
	for dir := path.Dir(p); dir != "." && dir != "/"; dir = path.Dir(dir) {
		if links[dir] {
			return true
		}
	}
	return false
}

// deviceNumber reports whether the container has a device of that number.
func (c *check) deviceNumber(h *tar.Header) bool {
	typ := "c"
	if h.Typeflag == tar.TypeBlock {
		typ = "b"
	}
	for _, d := range defaultDevices {
		if d.Type == typ && d.Major == h.Devmajor && d.Minor == h.Devminor {
			return true
		}
	}
	for _, d := range c.spec.Linux.Devices {
		t := d.Type
		if t == "u" {
			t = "c"
		}
		if t == typ && d.Major == h.Devmajor && d.Minor == h.Devminor {
			return true
		}
	}
	return false
}
