// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// maxLinks bounds the links that are followed for one path, as the kernel does.
const maxLinks = 40

// rootfs is a container's root filesystem, in which anybody may have put any
// link: none is followed out of it.
type rootfs struct {
	root  *os.Root
	dir   *os.File          // the same
	links map[string]string // what was read so far; "" where there is no link
}

// openRootfs opens the root filesystem. Who does not see the mount there would
// see no links either, and is told so.
func openRootfs(path string) (*rootfs, error) {
	entries, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("root filesystem of the container: %w", err)
	}
	defer entries.Close()
	if _, err := entries.Readdirnames(1); err != nil {
		return nil, fmt.Errorf("root filesystem of the container: nothing is in %s: run thaw-snapshotter in containerd's mount namespace: %w", path, errdefs.ErrFailedPrecondition)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("root filesystem of the container: %w", err)
	}
	dir, err := root.Open(".")
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("root filesystem of the container: %w", err)
	}
	return &rootfs{root: root, dir: dir, links: make(map[string]string)}, nil
}

func (r *rootfs) close() {
	r.dir.Close()
	r.root.Close()
}

// direct reports whether there is no link on the way to an absolute path, as far as it exists: the kernel says so at once,
// for nearly all files.
func (r *rootfs) direct(p string) bool {
	fd, err := unix.Openat2(int(r.dir.Fd()), "."+path.Clean(p), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err == nil {
		unix.Close(fd)
	}
	return err == nil || err == unix.ENOENT
}

// readlink returns what an absolute path in the container links to, "" if it is
// no link.
func (r *rootfs) readlink(p string) string {
	target, known := r.links[p]
	if !known {
		target, _ = r.root.Readlink(p[1:])
		r.links[p] = target
	}
	return target
}

// resolve returns where a mount destination ends up in the container: links in
// the root filesystem are followed within it, what does not exist is taken as it
// is.
func (c *check) resolve(destination string) string {
	p := path.Clean("/" + destination)
	if c.rootfs == nil && below(p, "/var/run") { // a link to /run in every common image
		return strings.TrimPrefix(p, "/var")
	}
	if at, ok := c.walk(p, true, nil); ok {
		return at
	}
	return p
}

// walk returns where somebody ends up who opens a path in the restored container
// with some mounts in it: links of the root filesystem are followed, the last one
// if follow is true. Where a volume begins it goes on as if there was no link; see
// mayOpen. ok is false if the end cannot be told.
//
// The paths of open files have no links when they are dumped. Those of sockets
// may have.
func (c *check) walk(p string, follow bool, mounts map[string]specs.Mount) (at string, ok bool) {
	if len(p) >= maxPath {
		return "", false
	}
	if c.rootfs == nil {
		return path.Clean("/" + p), true
	}
	at = "/"
	direct := path.Clean(p) == p && c.rootfs.direct(p)
	rest := strings.Split(p, "/")
	for links := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		if part == "" || part == "." {
			continue
		}
		if part == ".." {
			if _, mounted := innermost(at, mounts); mounted {
				return "", false // what is above depends on links that are not known
			}
			at = path.Dir(at)
			continue
		}
		before := at
		at = path.Join(at, part)
		last := len(rest) == 0 && !follow
		destination, mounted := innermost(at, mounts)
		if mounted {
			switch m := mounts[destination]; {
			case bind(m):
			case m.Type == "proc" && magic(path.Base(before), part, len(rest) == 0):
				return "", false
			case c.tmpfsLinks[strings.TrimPrefix(at, destination+"/")] && !last:
				return "", false
			}
			continue
		}
		if direct {
			continue
		}
		target := c.rootfs.readlink(at)
		if target == "" || last {
			continue
		}
		if links++; links > maxLinks {
			return "", false
		}
		if at = before; strings.HasPrefix(target, "/") {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at, true
}

// magic reports whether a name in /proc is one of the links to what a process
// has open, whatever their text is. No open file has such a path.
func magic(dir, name string, last bool) bool {
	switch dir {
	case "fd", "map_files", "ns":
		return true
	}
	switch name {
	case "root", "cwd", "exe", "thread-self":
		return true
	case "self":
		return !last
	}
	return false
}

// innermost returns the destination of the mount that a path lies in; mounted is
// false if that is the root filesystem.
func innermost(p string, mounts map[string]specs.Mount) (destination string, mounted bool) {
	for d := range mounts {
		if len(d) > len(destination) && strings.HasPrefix(p, d) && (len(p) == len(d) || p[len(d)] == '/') {
			destination, mounted = d, true
		}
	}
	return destination, mounted
}
