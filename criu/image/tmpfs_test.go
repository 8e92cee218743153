// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// mount makes the entry of a tmpfs that is CRIU's own.
func mount(id, dev uint32, change func(*mnt.MntEntry)) *mnt.MntEntry {
	e := &mnt.MntEntry{
		Fstype: proto.Uint32(uint32(mnt.Fstype_TMPFS)), MntId: proto.Uint32(id), RootDev: proto.Uint32(dev), ParentMntId: proto.Uint32(1),
		Flags: proto.Uint32(unix.MS_NOSUID), SbFlags: proto.Uint32(0), Root: proto.String("/"), Mountpoint: proto.String("/m"),
		Source: proto.String("tmpfs"), Options: proto.String("mode=755"),
	}
	if change != nil {
		change(e)
	}
	return e
}

func TestTmpfs(t *testing.T) {
	masked := func(e *mnt.MntEntry) { e.Root, e.ExtKey = proto.String("/null"), proto.String(MaskedFile) }
	first := encode(t, magicMounts,
		mount(1, 10, nil),
		mount(2, 10, masked),
		mount(3, 10, func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/again") }),
		mount(4, 11, func(e *mnt.MntEntry) { e.SbFlags = proto.Uint32(unix.MS_RDONLY); e.Source = proto.String("other") }),
		mount(5, 12, nil), // no archive: somebody else's
		mount(6, 13, nil), mount(7, 13, func(e *mnt.MntEntry) { e.Root = proto.String("/part") }),
		mount(8, 14, func(e *mnt.MntEntry) { e.SharedId = proto.Uint32(1) }),
		mount(9, 15, func(e *mnt.MntEntry) { e.MasterId = proto.Uint32(1) }),
		mount(10, 16, func(e *mnt.MntEntry) { e.Deleted = proto.Bool(true) }),
		mount(11, 17, func(e *mnt.MntEntry) { e.SbFlags = proto.Uint32(unix.MS_SYNCHRONOUS) }),
		mount(12, 18, func(e *mnt.MntEntry) { e.SbFlags = nil }),
		mount(13, 19, func(e *mnt.MntEntry) { e.Fstype = proto.Uint32(uint32(mnt.Fstype_DEVTMPFS)) }),
	)
	second := encode(t, magicMounts, mount(20, 20, nil), mount(21, 99, nil))
	files := map[string][]byte{"mountpoints-5.img": first, "mountpoints-6.img": second}
	for _, dev := range []string{"10", "11", "13", "14", "15", "16", "17", "18", "19"} {
		files["tmpfs-dev-"+dev+".tar.gz.img"] = []byte("x")
	}
	d := dir(t, files)
	got, err := d.Tmpfs()
	want := []Tmpfs{
		{Device: 10, Archive: "tmpfs-dev-10.tar.gz.img", Source: "tmpfs", Options: "mode=755"},
		{Device: 11, Archive: "tmpfs-dev-11.tar.gz.img", Source: "other", Options: "mode=755", ReadOnly: true},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}

	changed, err := d.GiveMounts(map[uint32]string{10: "key"})
	if err != nil || len(changed) != 1 {
		t.Fatalf("%d images, %v", len(changed), err)
	}
	key := func(e *mnt.MntEntry) { e.ExtKey = proto.String("key") }
	f, err := newFrames("", changed["mountpoints-5.img"], magicMounts)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []*mnt.MntEntry{
		mount(1, 10, key), mount(2, 10, masked), mount(3, 10, func(e *mnt.MntEntry) { key(e); e.Mountpoint = proto.String("/again") }),
	} {
		e := &mnt.MntEntry{}
		if err := f.decode(e); err != nil || !proto.Equal(e, want) {
			t.Errorf("mount %d: %v, %v", i, e, err)
		}
	}
	// All else stays as it was.
	if rest := first[len(first)-len(f.in):]; string(rest) != string(f.in) {
		t.Error("mounts of other filesystems have changed")
	}
}

// TestGiveMountsReal: without anything to give, a real image is written as CRIU wrote it.
func TestGiveMountsReal(t *testing.T) {
	found, err := filepath.Glob("testdata/*/mountpoints-*.img")
	if err != nil || len(found) == 0 {
		t.Fatalf("no real images: %v", err)
	}
	for _, path := range found {
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(path)
		d := dir(t, map[string][]byte{name: before})
		mounts, err := d.Mounts()
		if err != nil {
			t.Fatal(err)
		}
		keys := make(map[uint32]string)
		for _, m := range mounts {
			if m.Type == "proc" {
				keys[m.Device] = "k"
			}
		}
		after, err := d.GiveMounts(keys)
		if err != nil || len(after) != 1 {
			t.Fatalf("%s: %d, %v", path, len(after), err)
		}
		again, err := dir(t, map[string][]byte{name: after[name]}).Mounts()
		if err != nil || len(again) != len(mounts) {
			t.Fatalf("%s: %d mounts, %v", path, len(again), err)
		}
		for i := range again {
			if mounts[i].Type == "proc" {
				mounts[i].ExternalKey, mounts[i].External = "k", true
			}
			if again[i] != mounts[i] {
				t.Errorf("%s: %+v became %+v", path, mounts[i], again[i])
			}
		}
	}
}
