// SPDX-License-Identifier: Apache-2.0

// Package premount makes the tmpfs mounts of a container (/dev, what hides parts of
// /proc and /sys) before CRIU runs. CRIU would make each during the restore, and
// run tar and gzip to unpack what was in it; a mount that it is given, it only binds.
//
// The daemon writes down once for each checkpoint what is in them (Plan); the shim
// makes them for each container (Make), and takes them away again when CRIU has bound
// them (Remove). Only what costs nobody memory is premounted: directories, links,
// devices and empty files. A tmpfs with other content stays CRIU's, which works in
// the container's cgroup.
package premount

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// Dir is the folder of a laid-out checkpoint, beside that of CRIU's images, with
	// the plan and those images that are different for CRIU if it is carried out.
	Dir = "premount"
	// planFile is the plan in it.
	planFile = "plan.json"

	// maxPlan bounds it in bytes.
	maxPlan = 4 << 20
	// maxEntries bounds the files in one mount.
	maxEntries = 4096
)

// Plan is what is premounted for a checkpoint.
type Plan struct {
	Mounts []Mount
	// Images are those that are different if the plan is carried out, Archives those
	// that CRIU does not need then.
	Images, Archives []string
}

// Mount is one tmpfs.
type Mount struct {
	Key      string // by which CRIU's images name it
	Source   string // as the kernel names it
	Options  string // of the tmpfs
	ReadOnly bool   // once it is filled
	Entries  []Entry
}

// Entry is a file in a tmpfs.
type Entry struct {
	Path     string // in the tmpfs, clean and relative; "." is its root
	Type     uint32 // S_IFDIR, S_IFREG (empty), S_IFLNK, S_IFIFO, S_IFCHR or S_IFBLK
	Mode     uint32 // permissions
	UID, GID int
	Device   uint64 `json:",omitempty"`
	Target   string `json:",omitempty"` // of a symbolic link
	Modified time.Time
}

// Write writes a plan into the folder of a laid-out checkpoint.
func (p *Plan) Write(root *os.Root) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return root.WriteFile(filepath.Join(Dir, planFile), b, 0o600)
}

// Read reads the plan beside a folder of CRIU images; nil if there is none.
func Read(images string) (*Plan, error) {
	f, err := os.Open(filepath.Join(Folder(images), planFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxPlan+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxPlan {
		return nil, fmt.Errorf("%s is larger than %d bytes: %w", f.Name(), maxPlan, errdefs.ErrInvalidArgument)
	}
	p := &Plan{}
	if err := json.Unmarshal(b, p); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return p, nil
}

// Folder is where the plan for a folder of CRIU images lies, and the images that are
// to be taken instead of those of the same name.
func Folder(images string) string { return filepath.Join(filepath.Dir(images), Dir) }

// Make makes the mounts in a folder, which it makes too, and returns their paths by
// their keys. After an error Remove removes what there is.
func Make(dir string, p *Plan) (map[string]string, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	out := make(map[string]string, len(p.Mounts))
	for i := range p.Mounts {
		m := &p.Mounts[i]
		at := filepath.Join(dir, fmt.Sprint(i))
		if err := m.make(at); err != nil {
			return nil, fmt.Errorf("tmpfs %s: %w", m.Key, err)
		}
		out[m.Key] = at
	}
	return out, nil
}

func (m *Mount) make(at string) error {
	if err := os.Mkdir(at, 0o700); err != nil {
		return err
	}
	if err := unix.Mount(m.Source, at, "tmpfs", 0, m.Options); err != nil {
		return os.NewSyscallError("mount", err)
	}
	// Nobody else is to see it, whatever its parent is.
	if err := unix.Mount("", at, "", unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	root, err := os.OpenRoot(at)
	if err != nil {
		return err
	}
	defer root.Close()
	for i := range m.Entries {
		if err := m.Entries[i].make(root); err != nil {
			return fmt.Errorf("%s: %w", m.Entries[i].Path, err)
		}
	}
	// Last, and the deepest first: what is made in a directory changes its time.
	for i := len(m.Entries) - 1; i >= 0; i-- {
		if err := m.Entries[i].touch(root); err != nil {
			return fmt.Errorf("%s: %w", m.Entries[i].Path, err)
		}
	}
	if m.ReadOnly {
		return os.NewSyscallError("mount", unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_RDONLY, m.Options))
	}
	return nil
}

// at calls a function with the open directory that an entry is in and its name
// there. No link leads out of the root.
func (e *Entry) at(root *os.Root, f func(dir int, name string) error) error {
	dir, err := root.Open(path.Dir(e.Path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return f(int(dir.Fd()), path.Base(e.Path))
}

func (e *Entry) make(root *os.Root) error {
	return e.at(root, func(dir int, name string) error {
		var err error
		switch {
		case e.Path == ".":
		case e.Type == unix.S_IFDIR:
			err = unix.Mkdirat(dir, name, 0o700)
		case e.Type == unix.S_IFLNK:
			err = unix.Symlinkat(e.Target, dir, name)
		default:
			err = unix.Mknodat(dir, name, e.Type|0o600, int(e.Device))
		}
		if err != nil {
			return err
		}
		if err := unix.Fchownat(dir, name, e.UID, e.GID, unix.AT_SYMLINK_NOFOLLOW); err != nil || e.Type == unix.S_IFLNK {
			return err
		}
		// It is no link: it was made here. (And a change of the owner takes bits away.)
		return unix.Fchmodat(dir, name, e.Mode, 0)
	})
}

func (e *Entry) touch(root *os.Root) error {
	return e.at(root, func(dir int, name string) error {
		t := unix.NsecToTimespec(e.Modified.UnixNano())
		return unix.UtimesNanoAt(dir, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
	})
}

// Remove removes all mounts in a folder that Make made, and the folder. What is not
// there is no error.
func Remove(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		// EINVAL: it was not mounted yet.
		if err := unix.Unmount(filepath.Join(dir, e.Name()), unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			return fmt.Errorf("unmount %s: %w", filepath.Join(dir, e.Name()), err)
		}
		// Not RemoveAll: should something still be mounted, its content is not ours.
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// known are the options of a tmpfs that are taken over.
var known = []string{"size", "nr_blocks", "nr_inodes", "mode", "uid", "gid", "inode32", "inode64", "huge", "noswap"}

// plainOptions reports whether only what is known is in the options of a tmpfs.
func plainOptions(options string) bool {
next:
	for o := range strings.SplitSeq(options, ",") {
		name, _, _ := strings.Cut(o, "=")
		for _, k := range known {
			if name == k || name == "" {
				continue next
			}
		}
		return false
	}
	return true
}
