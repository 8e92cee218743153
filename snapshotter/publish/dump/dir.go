// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// memoryDirs are where dumps go unless the user says otherwise.
var memoryDirs = []string{"/run/thaw", "/dev/shm"}

// margin is for what the estimate of memory leaves out, such as the content of
// tmpfs mounts and pipes.
const margin = 64 << 20

// memoryDir makes a folder for a dump of about need bytes in dir, or where there
// is room.
func memoryDir(dir string, need int64) (string, error) {
	dirs := memoryDirs
	if dir != "" {
		dirs = []string{dir}
	}
	var errs []error
	for _, d := range dirs {
		if d == memoryDirs[0] {
			if err := os.MkdirAll(d, 0o700); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if err := holdsMemory(d, need); err != nil {
			errs = append(errs, err)
			continue
		}
		return os.MkdirTemp(d, "dump-")
	}
	return "", fmt.Errorf("no room in memory for the dump: %w", errors.Join(errs...))
}

// holdsMemory checks that a folder is on a tmpfs with room.
func holdsMemory(dir string, need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		return fmt.Errorf("%s is on a disk, which would freeze the container for long: mount a tmpfs there or name one with --dump-dir", dir)
	}
	if st.Type == unix.TMPFS_MAGIC && st.Blocks > 0 {
		if free := int64(st.Bavail) * st.Bsize; free < need+margin {
			return fmt.Errorf("%s has %d MiB left, the container needs about %d: enlarge it (mount -o remount,size=...) or name another tmpfs with --dump-dir", dir, free>>20, (need+margin)>>20)
		}
	}
	return nil
}
