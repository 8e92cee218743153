// SPDX-License-Identifier: Apache-2.0

package premount

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var when = time.Unix(1700000000, 0)

// archive makes an archive as CRIU has tar make it.
func archive(t testing.TB, entries ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, h := range entries {
		h.ModTime = when
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return &b
}

// dev is what is in a container's /dev, and more.
var dev = []tar.Header{
	{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
	{Typeflag: tar.TypeDir, Name: "./shm/", Mode: 0o1777},
	{Typeflag: tar.TypeSymlink, Name: "./fd", Linkname: "/proc/self/fd", Mode: 0o777},
	{Typeflag: tar.TypeChar, Name: "./null", Devmajor: 1, Devminor: 3, Mode: 0o666},
	{Typeflag: tar.TypeDir, Name: "./own/", Mode: 0o2700, Uid: 1000, Gid: 1001},
	{Typeflag: tar.TypeFifo, Name: "./own/fifo", Mode: 0o4640, Uid: 1000, Gid: 1001},
	{Typeflag: tar.TypeReg, Name: "./own/empty", Mode: 0o400},
}

// list describes all that is in a folder.
func list(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		link, _ := os.Readlink(path)
		out[name] = fmt.Sprintf("%o %d:%d %d:%d %s %d", st.Mode, st.Uid, st.Gid, unix.Major(st.Rdev), unix.Minor(st.Rdev), link, st.Mtim.Sec)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestMake(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	a, ok := NewMount("a", "tmpfs", "size=65536k,mode=755", false, archive(t, dev...))
	b, ok2 := NewMount("b", "none", "size=4k,nr_inodes=1", true, archive(t, tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o1777}))
	if !ok || !ok2 {
		t.Fatal("left to CRIU")
	}
	// As the shim gets it: over the file.
	layout := t.TempDir()
	root, err := os.OpenRoot(layout)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := root.Mkdir(Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if p, err := Read(filepath.Join(layout, "criu")); p != nil || err != nil {
		t.Fatalf("a plan that is not there: %v, %v", p, err)
	}
	if err := (&Plan{Mounts: []Mount{*a, *b}, Images: []string{"i"}, Archives: []string{"x"}}).Write(root); err != nil {
		t.Fatal(err)
	}
	p, err := Read(filepath.Join(layout, "criu"))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "mounts")
	t.Cleanup(func() {
		if err := Remove(dir); err != nil {
			t.Error(err)
		}
	})
	old := unix.Umask(0o077) // whatever that is
	paths, err := Make(dir, p)
	unix.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		".": "40755 0:0 0:0  1700000000", "shm": "41777 0:0 0:0  1700000000", "fd": "120777 0:0 0:0 /proc/self/fd 1700000000",
		"null": "20666 0:0 1:3  1700000000", "own": "42700 1000:1001 0:0  1700000000",
		"own/fifo": "14640 1000:1001 0:0  1700000000", "own/empty": "100400 0:0 0:0  1700000000",
	}
	if got := list(t, paths["a"]); !reflect.DeepEqual(got, want) {
		t.Errorf("%v", got)
	}
	if got := list(t, paths["b"]); got["."] != "41777 0:0 0:0  1700000000" || len(got) != 1 {
		t.Errorf("%v", got)
	}
	if err := os.WriteFile(filepath.Join(paths["b"], "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("written to a read-only one: %v", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(mounts), "\n") {
		if strings.Contains(line, dir) && strings.Contains(line, "shared:") {
			t.Errorf("others see it: %s", line)
		}
	}
	if err := Remove(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

// TestMakeBroken: what could not be made leaves nothing behind when it is removed.
func TestMakeBroken(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	at := filepath.Join(t.TempDir(), "outside")
	for name, m := range map[string]Mount{
		"option":         {Options: "what=1"},
		"through a link": {Entries: []Entry{{Path: ".", Type: unix.S_IFDIR}, {Path: "l", Type: unix.S_IFLNK, Target: filepath.Dir(at)}, {Path: "l/outside", Type: unix.S_IFREG}}},
		"out of it":      {Entries: []Entry{{Path: "../outside", Type: unix.S_IFREG}}},
		"twice":          {Entries: []Entry{{Path: "a", Type: unix.S_IFREG}, {Path: "a", Type: unix.S_IFREG}}},
	} {
		dir := filepath.Join(t.TempDir(), "mounts")
		if _, err := Make(dir, &Plan{Mounts: []Mount{{Key: "good", Source: "x"}, m}}); err == nil {
			t.Errorf("%s: made", name)
		}
		if err := Remove(dir); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(at); err == nil {
			t.Errorf("%s: a file outside", name)
		}
	}
	if err := Remove(filepath.Join(t.TempDir(), "none")); err != nil {
		t.Error(err)
	}
}

func TestLeftToCRIU(t *testing.T) {
	root := tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755}
	file := func(h tar.Header) []tar.Header { return []tar.Header{root, h} }
	for name, entries := range map[string][]tar.Header{
		"content":        file(tar.Header{Typeflag: tar.TypeReg, Name: "./x", Size: 1}),
		"hard link":      {root, {Typeflag: tar.TypeReg, Name: "./x"}, {Typeflag: tar.TypeLink, Name: "./y", Linkname: "./x"}},
		"absolute":       file(tar.Header{Typeflag: tar.TypeReg, Name: "/x"}),
		"out of it":      file(tar.Header{Typeflag: tar.TypeReg, Name: "../x"}),
		"through a link": {root, {Typeflag: tar.TypeSymlink, Name: "./l", Linkname: "/"}, {Typeflag: tar.TypeReg, Name: "./l/x"}},
		"below a file":   {root, {Typeflag: tar.TypeReg, Name: "./f"}, {Typeflag: tar.TypeReg, Name: "./f/x"}},
		"below nothing":  file(tar.Header{Typeflag: tar.TypeReg, Name: "./d/x"}),
		"twice":          {root, {Typeflag: tar.TypeReg, Name: "./x"}, {Typeflag: tar.TypeReg, Name: "x"}},
		"no root":        {{Typeflag: tar.TypeReg, Name: "./x"}},
		"two roots":      {root, root},
		"names of users": file(tar.Header{Typeflag: tar.TypeReg, Name: "./x", Uname: "root"}),
		"nothing":        nil,
	} {
		if m, ok := NewMount("k", "tmpfs", "mode=755", false, archive(t, entries...)); ok {
			t.Errorf("%s: %+v", name, m)
		}
	}
	for _, options := range []string{"context=x", "mode=755,what", "size=1,,x=1"} {
		if _, ok := NewMount("k", "tmpfs", options, false, archive(t, root)); ok {
			t.Errorf("options %s", options)
		}
	}
	whole := archive(t, dev...).Bytes()
	for _, damaged := range [][]byte{nil, []byte("no gzip"), whole[:len(whole)/2]} {
		if _, ok := NewMount("k", "tmpfs", "", false, bytes.NewReader(damaged)); ok {
			t.Error("damaged")
		}
	}
	if _, ok := NewMount("k", "tmpfs", "", false, bytes.NewReader(whole)); !ok {
		t.Error("without options it is none")
	}
}

func FuzzNewMount(f *testing.F) {
	f.Add("mode=755", archive(f, dev...).Bytes())
	f.Fuzz(func(t *testing.T, options string, archive []byte) {
		m, ok := NewMount("k", "tmpfs", options, false, bytes.NewReader(archive))
		if !ok {
			return
		}
		seen := make(map[string]bool)
		for _, e := range m.Entries {
			if seen[e.Path] || filepath.Clean(e.Path) != e.Path || !filepath.IsLocal(e.Path) {
				t.Errorf("%+v", m.Entries)
			}
			seen[e.Path] = true
		}
	})
}
