// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/criu/image"
)

// Whatever a tmpfs archive holds, checking it ends, and what is admitted lies
// within the mount.
func FuzzArchive(f *testing.F) {
	f.Add(archive(f, ordinary().tmpfs))
	path := ordinary().write(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(filepath.Join(path, "tmpfs-dev-62.tar.gz.img"), in, 0o600); err != nil {
			t.Fatal(err)
		}
		d, err := image.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		c := newCheck(spec(), Options{})
		c.dir = d
		if err := c.archives(); err != nil && !errors.Is(err, image.ErrFormat) {
			t.Fatalf("error %v is not ErrFormat", err)
		}
	})
}

// FuzzCheck checks a good dump of which one file is replaced, in a root filesystem: whatever it is, the check ends, and its
// error says whose fault it is.
func FuzzCheck(f *testing.F) {
	d := ordinary()
	d.extra["ghost-file-1.img"] = ghost(f, 0o100600)
	path := d.write(f)
	names, err := os.ReadDir(path)
	if err != nil {
		f.Fatal(err)
	}
	content := make([][]byte, len(names))
	for n, e := range names {
		if content[n], err = os.ReadFile(filepath.Join(path, e.Name())); err != nil {
			f.Fatal(err)
		}
		if len(content[n]) < 4096 {
			f.Add(uint8(n), content[n])
		}
	}
	rootfs := f.TempDir()
	if err := os.Symlink("/run", filepath.Join(rootfs, "link")); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, n uint8, in []byte) {
		at := int(n) % len(names)
		name := filepath.Join(path, names[at].Name())
		if err := os.WriteFile(name, in, 0o600); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := os.WriteFile(name, content[at], 0o600); err != nil {
				t.Error(err)
			}
		}()
		d, err := image.Open(path)
		if err != nil {
			if !errors.Is(err, image.ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		defer d.Close()
		err = Check(d, spec(), Options{Rootfs: rootfs, Filter: filter})
		if err != nil && !errors.Is(err, image.ErrFormat) && !errdefs.IsFailedPrecondition(err) {
			t.Fatalf("error of no class: %v", err)
		}
	})
}
