// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"path"

	"thaw.dev/thaw/criu/image"
)

// mountTree returns the mounts by their places. It refuses what would make a
// check of a place say nothing about what the container sees there: mounts of a namespace that no
// task is in, two at one place, and those that another mount hides.
func (c *check) mountTree(all []image.Mount) (map[string]image.Mount, error) {
	at := make(map[string]image.Mount, len(all))
	c.mountIDs = make(map[uint32]bool, len(all))
	refuse := func(m *image.Mount, why string) {
		c.refuse(Difference{
			Field: "mount", Image: quote(m.Mountpoint) + ", " + why, Spec: "each mount once, in sight",
			Remedy: "make the checkpoint from a container that mounts nothing over its other mounts",
		})
	}
	for i := range all {
		m := &all[i]
		if c.mountIDs[m.ID] {
			return nil, fmt.Errorf("%w: mount %d is in the images twice", image.ErrFormat, m.ID)
		}
		c.mountIDs[m.ID] = true
		if m.Namespace != c.tasks[0].IDs.MountNS {
			refuse(m, fmt.Sprintf("of mount namespace %d that no task is in", m.Namespace))
			continue
		}
		if _, twice := at[m.Mountpoint]; twice {
			refuse(m, "where another mount is too")
			continue
		}
		at[m.Mountpoint] = *m
	}
	for place, m := range at {
		if place == rootMountpoint || !inside(place) {
			continue
		}
		dir := path.Dir(place)
		for _, ok := at[dir]; !ok && dir != rootMountpoint; _, ok = at[dir] {
			dir = path.Dir(dir)
		}
		if above, ok := at[dir]; !ok || above.ID != m.Parent {
			refuse(&m, "which is not on the mount above it")
		}
	}
	return at, nil
}
