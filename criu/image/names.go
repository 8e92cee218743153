// SPDX-License-Identifier: Apache-2.0

package image

import (
	"strconv"
	"strings"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
)

// numbered takes the number out of the name of an image file.
func numbered(name, prefix string, n *uint32) bool {
	s, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return false
	}
	v, err := strconv.ParseUint(strings.TrimSuffix(s, ".img"), 10, 32)
	*n = uint32(v)
	return err == nil
}

func fsType(e *mnt.MntEntry) string {
	t := mnt.Fstype(e.GetFstype())
	if t == mnt.Fstype_AUTO {
		return e.GetFsname()
	}
	return strings.ToLower(t.String())
}
