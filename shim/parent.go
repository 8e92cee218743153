// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"thaw.dev/thaw/criu/image"
)

// makeParent gives the images of dir the empty parent that they need to be restored
// lazily; see image.EmptyParent. images are the files of a dump.
func makeParent(dir string, images []fs.DirEntry) error {
	var pids []uint32
	for _, e := range images {
		name, ok := strings.CutPrefix(e.Name(), "pagemap-")
		if !ok {
			continue
		}
		if pid, err := strconv.ParseUint(strings.TrimSuffix(name, ".img"), 10, 32); err == nil { // or it is of shared memory
			pids = append(pids, uint32(pid))
		}
	}
	if len(pids) == 0 {
		return nil
	}
	parent := filepath.Join(dir, image.Parent)
	if err := os.Mkdir(parent, 0o700); err != nil {
		return err
	}
	for name, content := range image.EmptyParent(pids) {
		if err := os.WriteFile(filepath.Join(parent, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}
