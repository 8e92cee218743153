// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"golang.org/x/sys/unix"
)

// ghosts checks the deleted files that CRIU makes anew: no devices, and nothing
// that would run as somebody else.
func (c *check) ghosts() error {
	all, err := c.dir.Ghosts()
	if err != nil {
		return err
	}
	for _, g := range all {
		switch g.Mode & unix.S_IFMT {
		case unix.S_IFREG, unix.S_IFDIR, unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFLNK:
		default:
			c.refuse(Difference{Field: "deleted file", Image: "a device (" + g.File + ")", Spec: "no such device", Remedy: "close it before the checkpoint"})
		}
		if g.Mode&unix.S_IFMT == unix.S_IFREG && g.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 {
			c.refuse(Difference{Field: "deleted file", Image: "a set-user-ID program (" + g.File + ")", Spec: "none", Remedy: "close it before the checkpoint"})
		}
	}
	return nil
}
