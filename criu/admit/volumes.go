// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/image"
)

// volume checks that the pod's user may open a file that lies in a volume. CRIU
// opens files as root before a task has its own user again; without this check an
// image could read what the node shares with the pod but not with its user.
// Permissions beyond the mode, such as ACLs, are not seen and count as none.
//
// Links whose end cannot be told are refused whoever the user is: those in /proc lead to what CRIU itself has open.
func (c *check) volume(r *image.Regular) {
	at, ok := c.walk(r.Path, r.Flags&unix.O_NOFOLLOW == 0, c.destinations())
	if !ok {
		c.stray("open file", r.Path)
		return
	}
	if c.maySet(capDACOverride) {
		return
	}
	m, rest, ok := c.mountOf(at)
	if !ok || m.Source == "" {
		return
	}
	var want uint32
	switch {
	case r.Flags&unix.O_PATH != 0:
	case r.Flags&unix.O_ACCMODE == unix.O_RDONLY:
		want = 4
	case r.Flags&unix.O_ACCMODE == unix.O_WRONLY:
		want = 2
	default:
		want = 6
	}
	if !c.mayOpen(m.Source, rest, want) {
		c.refuse(Difference{
			Field: "open file", Image: linked(r.Path, at), Spec: "a user who may not open it", Remedy: "let the pod's user access the file in the volume, or close it before the checkpoint",
		})
	}
}

// stray refuses a path that leads through a link whose end cannot be told, such
// as those in /proc.
func (c *check) stray(field, p string) {
	c.refuse(Difference{
		Field: field, Image: quote(p) + ", which leads through links", Spec: "paths that can be checked",
		Remedy: "the image's root filesystem is not the one that was dumped: make the checkpoint again",
	})
}

// linked names a path, and its end if that is another.
func linked(p, end string) string {
	if p == end {
		return quote(p)
	}
	return quote(p) + ", a link to " + quote(end)
}

// socket checks that the pod's user could have bound a unix socket that lies in a
// volume: CRIU removes, as root, what is at its path, binds anew, and gives it the
// owner that the images name.
func (c *check) socket(u *image.Unix) {
	name, _, _ := strings.Cut(u.Name, "\x00") // "" for one without a path
	if name == "" {
		return
	}
	p := name
	if !strings.HasPrefix(p, "/") {
		p = u.Dir + "/" + name
	}
	at, ok := c.walk(p, false, c.destinations())
	if !ok {
		c.stray("unix socket", p)
		return
	}
	if c.maySet(capDACOverride) {
		return
	}
	m, rest, ok := c.mountOf(at)
	if !ok {
		return
	}
	user := c.spec.Process.User
	if !c.mayBind(m.Source, rest) {
		c.refuse(Difference{
			Field: "unix socket", Image: linked(p, at), Spec: "a user who may not bind it", Remedy: "let the pod's user write the folder in the volume and own the socket there, or close it before the checkpoint",
		})
	}
	if o := u.File; o != nil && (o.UID != user.UID || o.GID != user.GID && !slices.Contains(user.AdditionalGids, o.GID)) {
		c.refuse(Difference{
			Field: "unix socket", Image: fmt.Sprintf("%s of user %d and group %d", linked(p, at), o.UID, o.GID), Spec: "a user who may not give that away", Remedy: "restore in a pod with the checkpoint's user and groups",
		})
	}
}

// mayBind reports whether the pod's user could replace the socket at a path in a
// volume: it may write the folder, and what is there is a socket of its own.
func (c *check) mayBind(source, rest string) bool {
	const writeAndSearch = 3
	rest = strings.Trim(rest, "/")
	if source == "" || rest == "" || !c.mayOpen(source, path.Dir(rest), writeAndSearch) {
		return false
	}
	var st unix.Stat_t
	if err := unix.Lstat(path.Join(source, rest), &st); err != nil {
		return err == unix.ENOENT
	}
	return st.Mode&unix.S_IFMT == unix.S_IFSOCK && st.Uid == c.spec.Process.User.UID
}

// mapped checks mapped files as volume does: CRIU opens them anew, with flags of
// the mapping's own.
func (c *check) mapped(paths map[uint32]string) {
	type opened struct{ file, access uint32 }
	seen := make(map[opened]bool)
	for i := range c.tasks {
		if c.tasks[i].Memory == nil {
			continue
		}
		for _, a := range c.tasks[i].Memory.Areas {
			o := opened{uint32(a.File), a.Access & (unix.O_ACCMODE | unix.O_PATH)}
			if p, ok := paths[o.file]; ok && a.Mapped() && !seen[o] {
				seen[o] = true
				c.volume(&image.Regular{Path: p, Flags: o.access})
			}
		}
	}
}

// remaps refuses files in volumes that CRIU would make before it opens them, as a new
// one or as another name of one that is there: it does that as root, whoever may read or write there.
func (c *check) remaps(paths map[uint32]string) error {
	remaps, err := c.dir.Remaps()
	if err != nil {
		return err
	}
	for id, r := range remaps {
		ghost := fmt.Sprintf("ghost-file-%x.img", r.Target)
		_, known := paths[id]
		if _, ok := paths[r.Target]; !known || r.Ghost && !c.dir.Has(ghost) || !r.Ghost && !ok {
			return fmt.Errorf("%w: remap-fpath.img makes file %d of %d, one of which is in no image", image.ErrFormat, id, r.Target)
		}
		names := []string{paths[id]}
		if !r.Ghost {
			names = append(names, paths[r.Target])
		}
		for _, p := range names {
			at, ok := c.walk(p, false, c.destinations())
			if !ok {
				c.stray("open file", p)
				continue
			}
			if c.maySet(capDACOverride) {
				continue
			}
			if m, rest, ok := c.mountOf(at); ok && !(r.Ghost && c.mayMake(m.Source, rest)) {
				c.refuse(Difference{Field: "open file", Image: quote(p) + ", deleted and to be made anew", Spec: "a user who may not do that in a volume", Remedy: "close it before the checkpoint"})
			}
		}
	}
	return nil
}

// mayMake reports whether the pod's user could make a file at a path in a volume,
// and the directories above it that do not exist.
func (c *check) mayMake(source, rest string) bool {
	const writeAndSearch = 3
	parts := strings.Split(strings.Trim(rest, "/"), "/")
	var st unix.Stat_t
	if source == "" || unix.Stat(path.Clean(source), &st) != nil { // the runtime follows links to a source
		return false
	}
	at := path.Clean(source)
	for _, part := range parts[:len(parts)-1] {
		at = path.Join(at, part)
		var next unix.Stat_t
		if err := unix.Lstat(at, &next); err == unix.ENOENT {
			break
		} else if err != nil || next.Mode&unix.S_IFMT != unix.S_IFDIR || !c.permits(&st, 1) {
			return false
		}
		st = next
	}
	return c.permits(&st, writeAndSearch)
}

// mountOf returns the innermost bind mount of the spec that a path lies in, and
// the rest of the path.
func (c *check) mountOf(p string) (m specs.Mount, rest string, ok bool) {
	length := -1
	for destination, candidate := range c.destinations() {
		if !bind(candidate) || len(destination) <= length {
			continue
		}
		if p == destination || below(p, destination) {
			m, rest, ok, length = candidate, strings.TrimPrefix(p, destination), true, len(destination)
		}
	}
	return m, rest, ok
}

// mayOpen walks down from a volume's source as the pod's user would. A link is
// refused, since the kernel recorded a path without any; what does not exist is
// left to CRIU, which says so.
func (c *check) mayOpen(source, rest string, want uint32) bool {
	parts := strings.Split(strings.Trim(rest, "/"), "/")
	if parts[0] == "" || parts[0] == "." {
		parts = nil
	}
	at := path.Clean(source)
	for i := 0; ; i++ {
		var st unix.Stat_t
		var err error
		if i == 0 {
			err = unix.Stat(at, &st) // the runtime follows links to a source
		} else {
			err = unix.Lstat(at, &st)
		}
		switch {
		case err == unix.ENOENT:
			return true
		case err != nil || st.Mode&unix.S_IFMT == unix.S_IFLNK:
			return false
		case i == len(parts):
			return c.permits(&st, want)
		case !c.permits(&st, 1):
			return false
		}
		at = path.Join(at, parts[i])
	}
}

// permits applies the mode to the pod's user as the kernel does: the owner's
// bits, else the group's, else those of the others.
func (c *check) permits(st *unix.Stat_t, want uint32) bool {
	u := c.spec.Process.User
	mode := uint32(st.Mode)
	switch {
	case st.Uid == u.UID:
		mode >>= 6
	case st.Gid == u.GID || slices.Contains(u.AdditionalGids, st.Gid):
		mode >>= 3
	}
	return mode&want == want
}
