// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	remap_file_path "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
)

// Links returns the open files (OpenFile.ID) that CRIU does not find under their
// own paths but links there first from the path of another file.
func (d *Dir) Links() (map[uint32]uint32, error) {
	const name = "remap-fpath.img"
	out := make(map[uint32]uint32)
	fresh := func() *remap_file_path.RemapFilePathEntry { return &remap_file_path.RemapFilePathEntry{} }
	err := all(d, name, magicRemap, fresh, func(e *remap_file_path.RemapFilePathEntry) error {
		if e.OrigId == nil || e.RemapId == nil || len(out) == maxOpenFiles {
			return fmt.Errorf("%w: %s has an entry without a file, or more than %d", ErrFormat, name, maxOpenFiles)
		}
		// Without a type, as in images before CRIU 1.6, it may be one of these.
		if e.RemapType == nil || *e.RemapType == remap_file_path.RemapType_LINKED {
			out[*e.OrigId] = *e.RemapId
		}
		return nil
	})
	return out, err
}
