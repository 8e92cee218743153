// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	remap_file_path "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
)

// Remap is an open file that CRIU does not find under its own path.
type Remap struct {
	// Target is the file (OpenFile.ID) from whose path CRIU links it there first, or, if
	// Ghost is true, the number of the image of a deleted file (ghost-file-%x.img) that it makes there.
	Target uint32
	Ghost  bool
}

// Remaps returns the open files (OpenFile.ID) that CRIU makes at their paths before it
// opens them. Those of dead processes in /proc are none of them.
func (d *Dir) Remaps() (map[uint32]Remap, error) {
	const name = "remap-fpath.img"
	out := make(map[uint32]Remap)
	seen := make(map[uint32]bool)
	fresh := func() *remap_file_path.RemapFilePathEntry { return &remap_file_path.RemapFilePathEntry{} }
	err := all(d, name, magicRemap, fresh, func(e *remap_file_path.RemapFilePathEntry) error {
		if e.OrigId == nil || e.RemapId == nil || seen[*e.OrigId] || len(seen) == maxOpenFiles {
			return fmt.Errorf("%w: %s has an entry without a file, file %d twice, or more than %d", ErrFormat, name, e.GetOrigId(), maxOpenFiles)
		}
		seen[*e.OrigId] = true
		if e.RemapType == nil { // images before CRIU 1.6
			return fmt.Errorf("%w: %s has file %d in no way", ErrFormat, name, *e.OrigId)
		}
		switch *e.RemapType {
		case remap_file_path.RemapType_PROCFS:
		case remap_file_path.RemapType_LINKED, remap_file_path.RemapType_GHOST:
			out[*e.OrigId] = Remap{Target: *e.RemapId, Ghost: *e.RemapType == remap_file_path.RemapType_GHOST}
		default:
			return fmt.Errorf("%w: %s has file %d in the unknown way %d", ErrFormat, name, *e.OrigId, *e.RemapType)
		}
		return nil
	})
	return out, err
}
