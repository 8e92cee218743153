// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
)

// Mount is one mount in a container's mount namespace.
type Mount struct {
	Namespace  uint32 // the N of mountpoints-N.img
	ID, Parent uint32
	// Type is the name of the filesystem's type, as CRIU names it in lower
	// case ("proc", "tmpfs", "overlayfs"), or what the kernel called it.
	Type       string
	Device     uint32 // of the filesystem, as CRIU numbers it: equal numbers are one filesystem
	Mountpoint string // in the container, absolute
	Root       string // which part of the filesystem is mounted
	Source     string
	Options    string
	Flags      uint32 // as in mount(2): MS_
	SuperFlags uint32 // of the filesystem, as Flags
	// Shared is true if mounts below it appear in other mount namespaces too.
	Shared bool
	// ExternalKey names the mount that the restore has to be given, as runc
	// did: the mount's destination in the container, or "/dev/null" for masked
	// files. "" for a mount that CRIU makes itself.
	ExternalKey string
	// External is true if the content comes from outside of the container.
	External bool
	// Plugin is true if a CRIU plugin restores the mount.
	Plugin  bool
	Deleted bool
}

// Mounts returns the mounts of all dumped mount namespaces, in the order of the
// images: that of the kernel's mountinfo.
func (d *Dir) Mounts() ([]Mount, error) {
	var out []Mount
	for _, f := range d.files {
		var ns uint32
		if f.Kind != Message || !numbered(f.Name, "mountpoints-", &ns) {
			continue
		}
		err := all(d, f.Name, magicMounts, func() *mnt.MntEntry { return &mnt.MntEntry{} }, func(e *mnt.MntEntry) error {
			m := Mount{
				Namespace: ns, ID: e.GetMntId(), Parent: e.GetParentMntId(), Mountpoint: e.GetMountpoint(), Root: e.GetRoot(),
				Source: e.GetSource(), Options: e.GetOptions(), Flags: e.GetFlags(), ExternalKey: e.GetExtKey(),
				External: e.GetExtMount() || e.GetExtKey() != "", Plugin: e.GetWithPlugin(), Deleted: e.GetDeleted(),
				Type: fsType(e), Device: e.GetRootDev(), Shared: e.GetSharedId() != 0, SuperFlags: e.GetSbFlags(),
			}
			if m.Mountpoint == "" || len(out) == maxMounts {
				return fmt.Errorf("%w: %s has a mount without a place, or more than %d", ErrFormat, f.Name, maxMounts)
			}
			out = append(out, m)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// maxMounts bounds the mounts in images: the kernel's own limit for a mount
// namespace (fs.mount-max).
const maxMounts = 100_000

// ExternalMounts returns the mounts whose content came from outside of the
// container, without those of masked files.
func (d *Dir) ExternalMounts() ([]Mount, error) {
	all, err := d.Mounts()
	var out []Mount
	for _, m := range all {
		if m.External && m.ExternalKey != MaskedFile {
			out = append(out, m)
		}
	}
	return out, err
}

// MaskedFile is the ExternalKey of files that the runtime hides behind
// /dev/null (the OCI spec's maskedPaths).
const MaskedFile = "/dev/null"
