// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
)

// kernelTypes are the filesystems that runc mounts itself in every container;
// CRIU mounts them anew from what the images say. Any other type would let an
// image choose a source on the host.
var kernelTypes = map[string]bool{
	"proc": true, "sysfs": true, "tmpfs": true, "devpts": true, "mqueue": true, "cgroup": true, "cgroup2": true,
}

const (
	rootMountpoint = "/"
	consolePlace   = "/dev/console"
)

func (c *check) mounts() error {
	all, err := c.dir.Mounts()
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("%w: no mounts in the images", image.ErrFormat)
	}
	want := c.destinations()
	c.givenDevices = givenDevices(all)
	at, err := c.mountTree(all)
	if err != nil {
		return err
	}
	for i := range all {
		m := &all[i]
		if !inside(m.Mountpoint) || m.Deleted {
			c.refuse(Difference{Field: "mount", Image: quote(m.Mountpoint), Spec: "mounts inside the container's root", Remedy: "make the checkpoint from an ordinary container"})
			continue
		}
		c.mountFlags(m, want)
		switch {
		case m.Plugin:
			c.refuse(Difference{Field: "mount", Image: quote(m.Mountpoint) + ", restored by a CRIU plugin", Spec: "no such mount", Remedy: "make the checkpoint from a container without it"})
		case m.Mountpoint == rootMountpoint:
			c.flags(m, "/", c.spec.Root.Readonly, nil)
		case m.External && m.ExternalKey == image.MaskedFile:
			c.masked(m)
		case m.External:
			c.external(m, want)
		case c.givenDevices[m.Device], slices.Contains(strings.Split(m.Root, "/"), ".."):
			// CRIU would bind it to a place in what the restore is given, and take
			// the flags from the image: a read-only volume would be writable, and
			// dots lead out of it.
			c.refuse(Difference{
				Field: "mount", Image: fmt.Sprintf("a part (%s) of another filesystem at %s", quote(m.Root), quote(m.Mountpoint)), Spec: "no such mount",
				Remedy: "make the checkpoint from a container that mounts nothing itself",
			})
		default:
			c.internal(m, want)
		}
	}
	c.hidden(at)
	return nil
}

// givenDevices are the filesystems that the restore is given; see check. What masks a file is none: it is a device node of the container's own /dev.
func givenDevices(all []image.Mount) map[uint32]bool {
	out := make(map[uint32]bool)
	for i := range all {
		if m := &all[i]; m.Mountpoint == rootMountpoint || m.External && m.ExternalKey != image.MaskedFile {
			out[m.Device] = true
		}
	}
	return out
}

// destinations are the spec's mounts by the place where they end up.
func (c *check) destinations() map[string]specs.Mount {
	if c.places != nil {
		return c.places
	}
	out := make(map[string]specs.Mount)
	for _, m := range c.spec.Mounts {
		if c.rootfs == nil {
			out[path.Clean("/"+m.Destination)] = m
		}
		out[c.resolve(m.Destination)] = m
	}
	c.places = out
	return out
}

// external checks a mount whose content the restore is given: runc gives CRIU
// those of the spec under the name of their destination.
func (c *check) external(m *image.Mount, want map[string]specs.Mount) {
	key := m.ExternalKey
	if key != m.Mountpoint {
		c.refuse(Difference{
			Field: "external mount", Image: fmt.Sprintf("%s at %s", quote(key), quote(m.Mountpoint)), Spec: "each mount at its own destination",
			Remedy: "make the checkpoint with runc or containerd",
		})
		return
	}
	if s, ok := want[key]; ok && bind(s) {
		c.flags(m, key, has(s, "ro", "rro"), s.Options)
		return
	}
	// cgroup v1: each controller is an external mount below the spec's one.
	if s, ok := want[path.Dir(key)]; ok && s.Type == "cgroup" {
		c.flags(m, key, has(s, "ro", "rro"), s.Options)
		return
	}
	for _, d := range c.spec.Linux.Devices {
		if d.Path == key {
			return
		}
	}
	c.refuse(Difference{
		Field: "external mount", Image: quote(key), Spec: "no mount there",
		Remedy: "add a volume with this mountPath to the pod",
	})
}

// masked checks a file that is hidden.
func (c *check) masked(m *image.Mount) {
	switch {
	case len(c.spec.Linux.MaskedPaths) == 0:
		c.refuse(Difference{
			Field: "masked path", Image: quote(m.Mountpoint), Spec: "no masked paths",
			Remedy: "restore in a pod that is not privileged and has no procMount: Unmasked",
		})
	case !ofKernel(m.Mountpoint) && !slices.Contains(c.spec.Linux.MaskedPaths, m.Mountpoint):
		c.refuse(Difference{
			Field: "masked path", Image: quote(m.Mountpoint), Spec: "it open",
			Remedy: "make the checkpoint from a container with the same masked paths",
		})
	}
}

// ofKernel reports whether a path is one of the kernel's own in /proc or /sys: none of a process, whose links CRIU
// would follow when it mounts something there.
func ofKernel(p string) bool {
	rest, ok := strings.CutPrefix(p, "/proc/")
	if !ok {
		return below(p, "/sys")
	}
	first, _, _ := strings.Cut(rest, "/")
	return strings.Trim(first, "0123456789") != "" && first != "self" && first != "thread-self"
}

// internal checks a mount that CRIU makes itself.
func (c *check) internal(m *image.Mount, want map[string]specs.Mount) {
	if !kernelTypes[m.Type] {
		c.refuse(Difference{
			Field: "mount", Image: fmt.Sprintf("a filesystem of type %s at %s", quote(m.Type), quote(m.Mountpoint)), Spec: "no such mount",
			Remedy: "make the checkpoint from a container that mounts nothing itself",
		})
		return
	}
	if !wholeRoot(m) {
		c.refuse(Difference{
			Field: "mount", Image: fmt.Sprintf("a part (%s) of %s at %s", quote(m.Root), quote(m.Type), quote(m.Mountpoint)), Spec: "no such mount",
			Remedy: "make the checkpoint from a container that mounts nothing itself",
		})
		return
	}
	c.mountOptions(m)
	if s, ok := want[m.Mountpoint]; ok && !bind(s) && (s.Type == m.Type || s.Type == "cgroup" && (m.Type == "tmpfs" || m.Type == "cgroup2")) {
		// The tmpfs of cgroup v1 only carries the controllers' mounts; those are
		// read-only, it is not.
		carrier := s.Type == "cgroup" && m.Type == "tmpfs"
		c.flags(m, m.Mountpoint, has(s, "ro", "rro") && !carrier, s.Options)
		return
	}
	// The terminal of the container's first process.
	if m.Type == "devpts" && m.Mountpoint == consolePlace && c.spec.Process.Terminal {
		return
	}
	// What hides or locks a part of /proc or /sys takes nothing but rights away.
	if m.Flags&unix.MS_RDONLY != 0 && ofKernel(m.Mountpoint) {
		return
	}
	c.refuse(Difference{
		Field: "mount", Image: fmt.Sprintf("%s at %s", quote(m.Type), quote(m.Mountpoint)), Spec: "no such mount",
		Remedy: "make the checkpoint from a container that mounts nothing itself, or give the pod this mount",
	})
}

// flags refuses a mount that allows more than the spec's.
func (c *check) flags(m *image.Mount, at string, readonly bool, options []string) {
	for _, f := range []struct {
		name string
		flag uint32
		must bool
	}{
		{"read-only", unix.MS_RDONLY, readonly},
		{"nosuid", unix.MS_NOSUID, slices.Contains(options, "nosuid")},
		{"nodev", unix.MS_NODEV, slices.Contains(options, "nodev")},
		{"noexec", unix.MS_NOEXEC, slices.Contains(options, "noexec")},
	} {
		if f.must && m.Flags&f.flag == 0 {
			c.refuse(Difference{
				Field: "mount " + quote(at), Image: "a mount that is not " + f.name, Spec: f.name,
				Remedy: "make the checkpoint from a container that mounts it " + f.name,
			})
		}
	}
}

// hidden checks that what the spec masks or makes read-only is so in the images.
func (c *check) hidden(at map[string]image.Mount) {
	for _, p := range c.spec.Linux.MaskedPaths {
		m, ok := at[p]
		masked := ok && (m.ExternalKey == image.MaskedFile || m.Type == "tmpfs" && m.Flags&unix.MS_RDONLY != 0)
		if !masked && c.opts.Exists(p) {
			c.refuse(Difference{Field: "masked path", Image: quote(p) + " open", Spec: "it masked", Remedy: "make the checkpoint from a container that is not privileged, on a node with the same kernel"})
		}
	}
	for _, p := range c.spec.Linux.ReadonlyPaths {
		m, ok := at[p]
		if !(ok && m.Flags&unix.MS_RDONLY != 0) && c.opts.Exists(p) {
			c.refuse(Difference{Field: "read-only path", Image: quote(p) + " writable", Spec: "it read-only", Remedy: "make the checkpoint from a container that is not privileged, on a node with the same kernel"})
		}
	}
}

func bind(m specs.Mount) bool { return m.Type == "bind" || has(m, "bind", "rbind") }

func has(m specs.Mount, options ...string) bool {
	return slices.ContainsFunc(m.Options, func(o string) bool { return slices.Contains(options, o) })
}

func below(p, dir string) bool { return strings.HasPrefix(p, dir+"/") }
