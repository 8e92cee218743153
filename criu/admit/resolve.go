// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks bounds the links that are followed for one path, as the kernel does.
const maxLinks = 40

// resolve returns where a mount destination ends up in the container: links in
// the root filesystem are followed within it, what does not exist is taken as it
// is.
func (c *check) resolve(destination string) string {
	p := path.Clean("/" + destination)
	if c.opts.Rootfs == "" {
		if below(p, "/var/run") { // a link to /run in every common image
			return strings.TrimPrefix(p, "/var")
		}
		return p
	}
	done, rest := "/", strings.Split(p[1:], "/")
	for links := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, part)
		// done holds no link, so the path stays within the root filesystem.
		target, ok := readlink(c.opts.Rootfs + next)
		if !ok || links == maxLinks {
			done = next
			continue
		}
		links++
		if strings.HasPrefix(target, "/") {
			done = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return done
}

func readlink(p string) (string, bool) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlink(p, buf)
	return string(buf[:max(n, 0)]), err == nil && n < len(buf)
}
