// SPDX-License-Identifier: Apache-2.0

package image

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Tmpfs is a tmpfs whose content is in an archive of the images.
type Tmpfs struct {
	Device   uint32 // as in Mount
	Archive  string // the image with its content
	Source   string
	Options  string
	ReadOnly bool // the filesystem, not only a mount of it
}

// Tmpfs returns each tmpfs that CRIU makes and fills by itself, and that somebody
// else can make for it (GiveMounts): all mounts of it that CRIU makes are of its root,
// none is shared with other mounts or deleted.
func (d *Dir) Tmpfs() ([]Tmpfs, error) {
	var out []Tmpfs
	known, not := make(map[uint32]bool), make(map[uint32]bool)
	err := d.mountEntries(func(_ string, e *mnt.MntEntry) error {
		dev := e.GetRootDev()
		t := Tmpfs{
			Device: dev, Archive: fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", dev),
			Source: e.GetSource(), Options: e.GetOptions(), ReadOnly: e.GetSbFlags()&unix.MS_RDONLY != 0,
		}
		if !d.Has(t.Archive) || given(e) {
			return nil
		}
		if e.GetFstype() != uint32(mnt.Fstype_TMPFS) || e.SbFlags == nil || e.GetSbFlags()&^unix.MS_RDONLY != 0 ||
			e.GetRoot() != "/" || e.GetSharedId() != 0 || e.GetMasterId() != 0 || e.GetDeleted() ||
			e.GetWithPlugin() {
			not[dev] = true
		}
		if !known[dev] {
			known[dev] = true
			out = append(out, t)
		}
		return nil
	})
	return slices.DeleteFunc(out, func(t Tmpfs) bool { return not[t.Device] }), err
}

// GiveMounts returns by their names the images that must be others for CRIU to be
// given filesystems, named by their devices, instead of making them. Its option
// `external mnt[KEY]:PATH` says where each is mounted.
func (d *Dir) GiveMounts(keys map[uint32]string) (map[string][]byte, error) {
	out := make(map[string][]byte)
	var changed []string
	err := d.mountEntries(func(name string, e *mnt.MntEntry) error {
		if key, ok := keys[e.GetRootDev()]; ok && !given(e) {
			e.ExtKey = &key
			changed = append(changed, name)
		}
		m, err := proto.MarshalOptions{AllowPartial: true, Deterministic: true}.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode %s: %w", name, err)
		}
		b := out[name]
		if b == nil {
			b = binary.LittleEndian.AppendUint32(nil, magicCommon)
			b = binary.LittleEndian.AppendUint32(b, magicMounts)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
		out[name] = append(b, m...)
		return nil
	})
	for name := range out {
		if !slices.Contains(changed, name) {
			delete(out, name)
		}
	}
	return out, err
}

// given reports whether CRIU is given a mount anyway. Files that are masked are mounts
// of /dev/null, and so of the filesystem of /dev.
func given(e *mnt.MntEntry) bool { return e.GetExtMount() || e.GetExtKey() != "" }

// mountEntries calls a function with each mount and the image it is in.
func (d *Dir) mountEntries(f func(name string, e *mnt.MntEntry) error) error {
	for _, file := range d.files {
		var ns uint32
		if file.Kind != Message || !numbered(file.Name, "mountpoints-", &ns) {
			continue
		}
		err := all(d, file.Name, magicMounts, func() *mnt.MntEntry { return &mnt.MntEntry{} }, func(e *mnt.MntEntry) error { return f(file.Name, e) })
		if err != nil {
			return err
		}
	}
	return nil
}
