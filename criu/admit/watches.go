// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
)

// watched checks the files that inotify descriptors watch. CRIU opens them as root, by a
// path, or by a handle that names any file of a filesystem, whichever part of it is mounted.
func (c *check) watched(watches []image.Watch) {
	for _, w := range watches {
		switch {
		case w.Path != "" && !inside(w.Path):
			c.refuse(Difference{Field: "inotify", Image: quote(w.Path), Spec: "paths inside the container's root", Remedy: "the checkpoint is damaged or was made by something else than CRIU: make it again"})
		case w.Path != "":
			c.volume(&image.Regular{Path: w.Path, Flags: unix.O_RDONLY})
		case c.givenDevices[w.Device] && c.grants().bounding&(1<<capDACReadSearch) == 0:
			c.refuse(Difference{
				Field: "inotify", Image: fmt.Sprintf("a watch on a file of filesystem %#x, which it does not name by a path", w.Device), Spec: "files inside the container's root",
				Remedy: "end the watch on files in volumes before the checkpoint",
			})
		}
	}
}
