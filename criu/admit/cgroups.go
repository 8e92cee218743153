// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"slices"
	"strings"
)

// cgroups checks that no path of a control group climbs out of where it begins.
// thaw has CRIU ignore control groups, so this is a second line.
func (c *check) cgroups() error {
	paths, err := c.dir.CgroupPaths()
	if err != nil {
		return err
	}
	for _, p := range paths {
		if slices.Contains(strings.Split(p, "/"), "..") || strings.ContainsRune(p, 0) {
			c.refuse(Difference{Field: "control group", Image: quote(p), Spec: "the pod's own", Remedy: "make the checkpoint from an ordinary container"})
		}
	}
	return nil
}
