// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
)

// privileged are the files that only a privileged process could have opened, or
// that reach out of the container.
var privileged = map[image.FileType]string{
	image.TunTap:     "close it before the checkpoint",
	image.BPFMap:     "close it before the checkpoint",
	image.Fanotify:   "close it before the checkpoint",
	image.PluginFile: "checkpoints with devices that need a CRIU plugin are not supported",
	image.Namespace:  "close it before the checkpoint",
}

// files checks every open file of every task.
func (c *check) files() error {
	files, err := c.dir.OpenFiles()
	if err != nil {
		return err
	}
	known := make(map[uint32]image.FileType, len(files))
	paths := make(map[uint32]string)
	for i := range files {
		f := &files[i]
		known[f.ID] = f.Type
		if f.Regular != nil {
			paths[f.ID] = f.Regular.Path
		}
		c.file(f)
	}
	c.mapped(paths)
	if err := c.remaps(paths); err != nil {
		return err
	}
	return c.references(known)
}

func (c *check) file(f *image.OpenFile) {
	if remedy, ok := privileged[f.Type]; ok {
		c.refuse(Difference{Field: "open file", Image: "a " + f.Type.String(), Spec: "no right to it", Remedy: remedy})
		return
	}
	if f.Type < image.RegularFile || f.Type > image.PidFD {
		c.refuse(Difference{Field: "open file", Image: "a " + f.Type.String(), Spec: "files that this thaw knows", Remedy: "use a newer thaw"})
		return
	}
	if o := f.Owner; o != nil && !c.maySet(capSetUID) && (o.UID != c.spec.Process.User.UID || o.EUID != c.spec.Process.User.UID) {
		c.refuse(Difference{Field: "owner of an open file", Image: fmt.Sprintf("uid %d and %d", o.UID, o.EUID), Spec: fmt.Sprint(c.spec.Process.User.UID), Remedy: "restore in a pod with the checkpoint's user"})
	}
	c.anySocket(f)
	if alarm := f.Clock == unix.CLOCK_REALTIME_ALARM || f.Clock == unix.CLOCK_BOOTTIME_ALARM; alarm && c.grants().bounding&(1<<capWakeAlarm) == 0 {
		c.refuse(Difference{Field: "open file", Image: "a timerfd that wakes the node", Spec: "no CAP_WAKE_ALARM", Remedy: "close it before the checkpoint"})
	}
	c.watched(f.Watches)
	switch {
	case f.Regular != nil:
		c.regular(f.Regular)
	case f.Unix != nil && f.Unix.Flags&(image.UnixExternal|image.UnixCallback|image.UnixInherit) != 0:
		c.refuse(Difference{
			Field: "unix socket", Image: "a connection out of the container (" + quote(f.Unix.Name) + ")", Spec: "no such connection",
			Remedy: "close it before the checkpoint",
		})
	case f.Unix != nil:
		c.socket(f.Unix)
	}
}

func (c *check) regular(r *image.Regular) {
	if !inside(r.Path) {
		c.refuse(Difference{Field: "open file", Image: quote(r.Path), Spec: "paths inside the container's root", Remedy: "the checkpoint is damaged or was made by something else than CRIU: make it again"})
		return
	}
	if r.External {
		c.refuse(Difference{Field: "open file", Image: quote(r.Path) + " from outside", Spec: "no such file", Remedy: "close it before the checkpoint"})
	}
	c.volume(r)
	if r.Mount >= 0 && !c.mountIDs[uint32(r.Mount)] {
		c.refuse(Difference{Field: "open file", Image: fmt.Sprintf("%s on mount %d, which is in no image", quote(r.Path), r.Mount), Spec: "the container's mounts", Remedy: "the checkpoint is damaged: make it again"})
	}
	switch r.Mode & unix.S_IFMT {
	case 0:
		c.refuse(Difference{Field: "open file", Image: quote(r.Path) + " of no type", Spec: "files whose type can be checked", Remedy: "dump with CRIU 4.1 or later"})
	case unix.S_IFCHR, unix.S_IFBLK:
		if !c.device(r.Path) {
			c.refuse(Difference{Field: "open device", Image: quote(r.Path), Spec: "no such device", Remedy: "close it before the checkpoint, or give the pod the device"})
		}
	}
}

// defaultDevices are those that every container has (OCI runtime spec,
// config-linux, "Default Devices").
var defaultDevices = map[string]specs.LinuxDevice{
	"/dev/null":    {Type: "c", Major: 1, Minor: 3},
	"/dev/zero":    {Type: "c", Major: 1, Minor: 5},
	"/dev/full":    {Type: "c", Major: 1, Minor: 7},
	"/dev/random":  {Type: "c", Major: 1, Minor: 8},
	"/dev/urandom": {Type: "c", Major: 1, Minor: 9},
	"/dev/tty":     {Type: "c", Major: 5, Minor: 0},
	"/dev/console": {Type: "c", Major: 5, Minor: 1},
	"/dev/ptmx":    {Type: "c", Major: 5, Minor: 2},
}

// device reports whether the container has a device at a path.
func (c *check) device(p string) bool {
	if _, ok := defaultDevices[p]; ok || below(p, "/dev/pts") {
		return true
	}
	for _, d := range c.spec.Linux.Devices {
		if d.Path == p {
			return true
		}
	}
	// Devices in a volume were there for the pod to use; the device cgroup judges.
	for _, m := range c.spec.Mounts {
		if bind(m) && (m.Destination == p || below(p, m.Destination)) {
			return true
		}
	}
	return false
}

// references checks that what tasks refer to is in the images.
func (c *check) references(known map[uint32]image.FileType) error {
	missing := func(t *image.Task, what string, id uint32) error {
		return fmt.Errorf("%w: %s of task %d is file %d, which files.img does not have", image.ErrFormat, what, t.PID, id)
	}
	tables := make(map[uint32]bool)
	for i := range c.tasks {
		t := &c.tasks[i]
		if t.State.Gone() {
			continue
		}
		for _, ref := range []struct {
			what string
			id   uint32
		}{{"executable", t.Memory.Exe}, {"working directory", t.FS.Cwd}, {"root directory", t.FS.Root}} {
			if known[ref.id] != image.RegularFile {
				return missing(t, ref.what, ref.id)
			}
		}
		for _, a := range t.Memory.Areas {
			// CRIU says of some pieces of shared memory that they map files too.
			if a.Status&(image.AreaAnonShared|image.AreaAnonPrivate|image.AreaSysVIPC|image.AreaSocket) != 0 {
				continue
			}
			if typ := known[uint32(a.File)]; a.Mapped() && (a.File > 1<<32-1 || typ != image.RegularFile && typ != image.MemFD) {
				return fmt.Errorf("%w: memory of task %d at %#x maps file %d, which files.img does not have", image.ErrFormat, t.PID, a.Start, a.File)
			}
		}
		if tables[t.IDs.Files] {
			continue
		}
		tables[t.IDs.Files] = true
		fds, err := c.dir.Descriptors(t.IDs.Files)
		if err != nil {
			return err
		}
		for _, fd := range fds {
			if typ, ok := known[fd.File]; !ok || typ != fd.Type {
				return missing(t, fmt.Sprintf("descriptor %d", fd.FD), fd.File)
			}
		}
	}
	return nil
}
