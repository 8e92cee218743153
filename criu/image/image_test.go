// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "github.com/checkpoint-restore/go-criu/v7/crit/images/creds"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/utsns"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

func TestOpenTakesRegularFilesOnly(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, place := range map[string]func(path string) error{
		"symbolic link": func(path string) error { return os.Symlink(secret, path) },
		"directory":     func(path string) error { return os.Mkdir(path, 0o700) },
		"special file":  func(path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		dir := t.TempDir()
		if err := place(filepath.Join(dir, "parent")); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	link := filepath.Join(t.TempDir(), "images")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(link); err == nil {
		t.Error("a link to a directory is opened")
	}
}

// A file that is exchanged for a link after the directory was listed is not
// followed, and names lead nowhere else.
func TestOpenFollowsNothing(t *testing.T) {
	d := dir(t, map[string][]byte{"pages-1.img": nil})
	path := filepath.Join(d.Path(), "pages-1.img")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", path); err != nil {
		t.Fatal(err)
	}
	if f, err := d.Open("pages-1.img"); err == nil {
		f.Close()
		t.Error("the link was followed")
	}
	for _, name := range []string{"../x", "/etc/passwd", ".", "", "pages-2.img"} {
		if _, err := d.Open(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: error %v", name, err)
		}
	}
}

func TestKinds(t *testing.T) {
	for name, want := range map[string]Kind{
		"inventory.img": Message, "core-1.img": Message, "core-4194304.img": Message, "pagemap-shmem-1049.img": Message,
		"pages-12.img": Pages, "ghost-file-1f.img": Content, "tcp-stream-a0b1.img": Content, "tmpfs-dev-62.tar.gz.img": Archive,
		"iptables-10.img": External, "descriptors.json": Descriptors, "dump.log": Diagnostic, "timens-0.img": Message,
		"core-.img": Unknown, "core-%d.img": Unknown, "core-1x.img": Unknown, "core-01.img": Unknown, "core--1.img": Unknown,
		"core-a.img": Unknown, "pages-1.img.tmp": Unknown, "parent": Unknown, "": Unknown, "core-1.img\n": Unknown,
		"core-123456789012345678901.img": Unknown, "creds-1.img": Unknown, "binfmt-misc.img": Unknown, "reg-files.img": Unknown,
	} {
		if got := KindOf(name); got != want {
			t.Errorf("%q is of kind %d, want %d", name, got, want)
		}
	}
}

func TestFrames(t *testing.T) {
	uts := encode(t, magicUTS, &utsns.UtsnsEntry{Nodename: proto.String("a"), Domainname: proto.String("b")})
	for name, tc := range map[string]struct {
		in   []byte
		want string
	}{
		"two messages": {append(uts, encodeRaw(magicUTS, []byte{10, 0, 18, 0})[8:]...), "more than one message"},
		"long message": {encodeRaw(magicUTS, make([]byte, maxMessage+1)), "over the limit"},
		"no protobuf":  {encodeRaw(magicUTS, []byte{0xff}), "message 0"},
		"cut":          {uts[:len(uts)-1], "ends in the middle"},
		"short magic":  {uts[:6], "magic"},
	} {
		_, err := dir(t, map[string][]byte{"utsns-4.img": tc.in}).Hostname(4)
		if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if _, err := dir(t, map[string][]byte{"x": nil}).Inventory(); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("no inventory: error %v", err)
	}
}

func TestMetadataIsBounded(t *testing.T) {
	d := dir(t, map[string][]byte{"seccomp.img": nil})
	if err := os.Truncate(filepath.Join(d.Path(), "seccomp.img"), maxMetadata+1); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Filters(); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "over the limit") {
		t.Errorf("error %v", err)
	}
}

// Credentials that go-criu does not know are read from its unknown fields, packed
// or not.
func TestNewerCredentials(t *testing.T) {
	p := proto.Uint32(5)
	base := func() *pb.CredsEntry {
		return &pb.CredsEntry{
			Uid: p, Gid: p, Euid: p, Egid: p, Suid: p, Sgid: p, Fsuid: p, Fsgid: p, Secbits: p,
			CapInh: []uint32{1, 0}, CapPrm: []uint32{2, 0}, CapEff: []uint32{4, 0}, CapBnd: []uint32{8, 1},
		}
	}
	for name, raw := range map[string][]byte{
		"one by one": protowire.AppendVarint(protowire.AppendTag(
			protowire.AppendVarint(protowire.AppendTag(nil, 19, protowire.VarintType), 16), 19, protowire.VarintType), 2),
		"packed": protowire.AppendBytes(protowire.AppendTag(nil, 19, protowire.BytesType), []byte{16, 2}),
	} {
		e := base()
		e.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(raw, 18, protowire.VarintType), 1))
		c, err := creds(e)
		if err != nil || c.Ambient != 2<<32|16 || !c.NoNewPrivs || c.Bounding != 1<<32|8 || c.Permitted != 2 || c.Effective != 4 || c.Inheritable != 1 {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
	e := base()
	if c, err := creds(e); err != nil || c.NoNewPrivs || c.Ambient != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	e.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 19, protowire.BytesType), []byte{1, 2, 3}))
	if _, err := creds(e); err == nil {
		t.Error("three words of ambient capabilities are accepted")
	}
	e.ProtoReflect().SetUnknown(protowire.AppendFixed32(protowire.AppendTag(nil, 18, protowire.Fixed32Type), 1))
	if _, err := creds(e); err == nil {
		t.Error("no_new_privs of another wire type is accepted")
	}
	e.Uid = nil
	if _, err := creds(e); err == nil {
		t.Error("credentials without a uid are accepted")
	}
}
