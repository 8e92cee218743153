// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

func TestUpperDir(t *testing.T) {
	dir := t.TempDir()
	overlay := func(options ...string) []mount.Mount {
		return []mount.Mount{{Type: "overlay", Options: append(options, "workdir=/w", "lowerdir=/l")}}
	}
	for _, tc := range []struct {
		mounts []mount.Mount
		ok     bool
	}{
		{overlay("upperdir="+dir, "index=off"), true},
		{overlay("upperdir="+dir, "metacopy=off"), true},
		{overlay("upperdir="+dir, "metacopy=on"), false},
		{overlay("upperdir="+dir, "userxattr"), false},
		{overlay("upperdir=/nowhere/at/all"), false},
		{overlay(), false},
		{[]mount.Mount{{Type: "bind", Source: dir}}, false},
		{append(overlay("upperdir="+dir), overlay("upperdir="+dir)...), false},
		{nil, false},
	} {
		if got, ok := upperDir(tc.mounts); ok != tc.ok || ok && got != dir {
			t.Errorf("%+v: %q, %v", tc.mounts, got, ok)
		}
	}
}

// A real overlay in which everything happens that can.
func TestWriteUpper(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount")
	}
	// An overlay cannot lie on an overlay, on which temporary files may be.
	base := t.TempDir()
	if err := unix.Mount("tmpfs", base, "tmpfs", 0, "size=16m"); err != nil {
		t.Skip("cannot mount: ", err)
	}
	defer unix.Unmount(base, unix.MNT_DETACH)
	in := func(p ...string) string { return filepath.Join(append([]string{base}, p...)...) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"lower/keep", "lower/replaced", "lower/gone", "upper", "work", "merged"} {
		must(os.MkdirAll(in(d), 0o755))
	}
	for _, f := range []string{"lower/keep/same", "lower/keep/changed", "lower/keep/deleted", "lower/replaced/old", "lower/gone/x"} {
		must(os.WriteFile(in(f), []byte("old"), 0o644))
	}
	must(os.Symlink("/nowhere/at/all", in("lower/keep/dangling")))
	must(unix.Mount("overlay", in("merged"), "overlay", 0, "index=off,lowerdir="+in("lower")+",upperdir="+in("upper")+",workdir="+in("work")))
	must(os.WriteFile(in("merged/keep/changed"), []byte("new"), 0o600))
	must(os.Remove(in("merged/keep/deleted")))
	must(os.Remove(in("merged/keep/dangling")))
	must(os.RemoveAll(in("merged/gone")))
	must(os.RemoveAll(in("merged/replaced")))
	must(os.Mkdir(in("merged/replaced"), 0o755))
	must(os.WriteFile(in("merged/replaced/new"), []byte("new"), 0o644))
	must(os.Link(in("merged/replaced/new"), in("merged/replaced/hard")))
	must(os.Symlink("new", in("merged/replaced/link")))
	must(unix.Unmount(in("merged"), 0))

	var buf bytes.Buffer
	must(writeUpper(context.Background(), &buf, in("upper")))
	got := map[string]byte{}
	for tr := tar.NewReader(&buf); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(err)
		got[h.Name] = h.Typeflag
		if h.Name == "keep/changed" && (h.Size != 3 || h.Mode != 0o644) {
			t.Errorf("%+v", h)
		}
	}
	want := map[string]byte{
		"keep/": tar.TypeDir, "keep/changed": tar.TypeReg, "keep/.wh.deleted": tar.TypeReg, "keep/.wh.dangling": tar.TypeReg,
		".wh.gone": tar.TypeReg, "replaced/": tar.TypeDir, "replaced/.wh..wh..opq": tar.TypeReg,
		"replaced/hard": tar.TypeReg, "replaced/new": tar.TypeLink, "replaced/link": tar.TypeSymlink,
	}
	for name, typ := range want {
		if got[name] != typ {
			t.Errorf("%s is %q, want %q", name, got[name], typ)
		}
		delete(got, name)
	}
	if len(got) != 0 {
		t.Errorf("too much: %v", got)
	}

	must(unix.Setxattr(in("upper/keep/changed"), "trusted.overlay.metacopy", nil, 0))
	if err := writeUpper(context.Background(), io.Discard, in("upper")); !errors.Is(err, errNotPlain) {
		t.Errorf("metadata copy: %v", err)
	}
}

func TestRepositoryOf(t *testing.T) {
	for in, want := range map[string][]string{
		"registry.example:5000/a/b:1": {"registry.example:5000/a/b"},
		"nginx":                       {"docker.io/library/nginx"},
		"sha256:0000":                 {"docker.io/library/sha256"},
		"UPPER":                       nil,
	} {
		if got := repositoryOf(in); !slices.Equal(got, want) {
			t.Errorf("%q: %q", in, got)
		}
	}
}
