// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	ggcrregistry "github.com/google/go-containerregistry/pkg/registry"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/klauspost/compress/zstd"
)

const sample = "../testdata/checkpoint.tar.zst"

// entry is an entry of a made archive.
type entry struct {
	tar.Header
	content string
}

func file(name, content string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}, content}
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, e := range entries {
		if err := tw.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestUnpackRefuses(t *testing.T) {
	link := func(name, to string, typ byte) entry {
		return entry{Header: tar.Header{Typeflag: typ, Name: name, Linkname: to}}
	}
	for what, entries := range map[string][]entry{
		"path out of the folder":     {file("../evil", "x")},
		"path out in the middle":     {file("checkpoint/../../evil", "x")},
		"absolute path":              {file("/etc/evil", "x")},
		"symbolic link":              {link("config.dump", "/etc/passwd", tar.TypeSymlink)},
		"symbolic link as image":     {link("checkpoint/core-1.img", "/etc/passwd", tar.TypeSymlink)},
		"hard link":                  {link("spec.dump", "/etc/passwd", tar.TypeLink)},
		"link in place of a folder":  {link("checkpoint", "/etc", tar.TypeSymlink), file("checkpoint/evil", "x")},
		"fifo":                       {link("checkpoint/pages-1.img", "", tar.TypeFifo)},
		"the same file twice":        {file("config.dump", "a"), file("config.dump", "b")},
		"the same file twice, dots":  {file("config.dump", "a"), file("./config.dump", "b")},
		"more than allowed":          {file("checkpoint/pages-1.img", strings.Repeat("x", 2000))},
		"more than allowed in total": {file("checkpoint/a", strings.Repeat("x", 600)), file("checkpoint/b", strings.Repeat("x", 600))},
	} {
		parent := t.TempDir()
		dir := filepath.Join(parent, "in")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		err := unpack(context.Background(), bytes.NewReader(archive(t, entries...)), dir, 1000)
		// A link where the folder is made beforehand is passed over, and what
		// follows goes into the folder.
		if what == "link in place of a folder" && err == nil {
			if st, serr := os.Lstat(filepath.Join(dir, "checkpoint")); serr != nil || !st.IsDir() {
				t.Errorf("%s: %v", what, st)
			}
			continue
		}
		if !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", what, err)
		}
		if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
			t.Errorf("%s: wrote outside of the folder", what)
		}
	}
}

func TestUnpackTakesWhatItNeeds(t *testing.T) {
	dir := t.TempDir()
	in := archive(t,
		entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "checkpoint/", Mode: 0o700}},
		file("./config.dump", "{}"), file("container.log", "noise"), file("volumes/data", "noise"),
		file("checkpoint/deep/file", "noise"), file("checkpoint/inventory.img", "x"), file("bind.mounts", "noise"))
	if err := unpack(context.Background(), bytes.NewReader(in), dir, 0); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			got = append(got, strings.TrimPrefix(p, dir+"/"))
		}
		return err
	})
	if want := "checkpoint/inventory.img config.dump"; err != nil || strings.Join(got, " ") != want {
		t.Errorf("%q, %v", got, err)
	}
}

func pushBase(t *testing.T) string {
	t.Helper()
	srv := httptest.NewServer(ggcrregistry.New(ggcrregistry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	img, err := mutate.Config(empty.Image, ggcr.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ref := strings.TrimPrefix(srv.URL, "http://") + "/base:1"
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
	return ref
}

// The same archive plain, by gzip and by zstd.
func TestOpen(t *testing.T) {
	base := pushBase(t)
	p, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	zr, err := zstd.NewReader(bytes.NewReader(p))
	if err != nil {
		t.Fatal(err)
	}
	defer zr.Close()
	plain, err := io.ReadAll(zr)
	if err != nil {
		t.Fatal(err)
	}
	var gz bytes.Buffer
	zw := gzip.NewWriter(&gz)
	if _, err := zw.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	for what, content := range map[string][]byte{"zstd": p, "gzip": gz.Bytes(), "plain": plain} {
		name, temp := filepath.Join(t.TempDir(), "checkpoint"), t.TempDir()
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := Open(context.Background(), name, Options{TempDir: temp, Base: base})
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		s := a.Source
		if s.Container.Name != "main" || s.Host.CRIU != "4.2.1" || s.Host.Architecture != "amd64" || s.Rootfs == nil || s.Created.IsZero() || s.Base.Reference != base {
			t.Errorf("%s: %+v", what, s)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
			t.Errorf("%s: left %v behind", what, left)
		}
	}
}

func TestOpenErrors(t *testing.T) {
	temp := t.TempDir()
	for what, content := range map[string][]byte{
		"empty":          nil,
		"no tar":         []byte(strings.Repeat("no tar ", 1000)),
		"no checkpoint":  archive(t, file("config.dump", "{}"), file("spec.dump", "{}")),
		"broken gzip":    {0x1f, 0x8b, 1, 2, 3},
		"broken zstd":    {0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3},
		"broken images":  archive(t, file("checkpoint/inventory.img", "x"), file("config.dump", "{}"), file("spec.dump", "{}")),
		"an OCI archive": archive(t, file("oci-layout", "{}"), file("index.json", "{}")),
	} {
		name := filepath.Join(t.TempDir(), "checkpoint")
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(context.Background(), name, Options{TempDir: temp})
		if !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left %v behind", left)
	}
	if _, err := Open(context.Background(), filepath.Join(temp, "nothing"), Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing archive: %v", err)
	}
}

func TestBaseReference(t *testing.T) {
	for want, c := range map[string]containerConfig{
		"r/app@sha256:1": {RootfsImageRef: "r/app@sha256:1", RootfsImageName: "r/app:1"},
		"r/app:1":        {RootfsImageRef: "sha256:1", RootfsImageName: "r/app:1"},
		"r/app:2":        {RootfsImageRef: "sha256:1", RootfsImage: "r/app:2"},
		"":               {RootfsImageRef: "sha256:1"},
	} {
		if got := baseReference(c); got != want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, file("config.dump", "{}"), file("checkpoint/a", "x")))
	f.Add(archive(f, file("../x", "")))
	f.Add([]byte{0x1f, 0x8b})
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd})
	f.Fuzz(func(t *testing.T, in []byte) {
		parent := t.TempDir()
		dir := filepath.Join(parent, "in")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		_ = unpack(context.Background(), bytes.NewReader(in), dir, 1<<20) // any error is right
		if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
			t.Fatal("wrote outside of the folder")
		}
		err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() && !d.Type().IsRegular() {
				t.Errorf("%s is no regular file", p)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}
