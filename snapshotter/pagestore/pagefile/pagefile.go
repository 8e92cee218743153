// SPDX-License-Identifier: Apache-2.0

// Package pagefile tells whether a file of the page store still holds what was
// written to it, as far as that can be known without reading it: the daemon that
// writes the file and the fault handlers that map it ask before they rely on it.
//
// What is noticed: that the kernel could not write pages of the file to the disk,
// after which it may drop them and read old content instead; and that the file was
// cut short, after which what is missing would read as zeros once the file grows again.
// What is not noticed: that somebody who may write to the file has changed its content.
package pagefile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// BootFile lies beside a data file and says of which boot its content is. Without
// it, nobody opens the data file again.
const BootFile = "boot"

// Sound returns nil if nothing is known against the file, which has size bytes. An
// error of writing to the disk is reported to each descriptor that was open before it,
// once: whoever gets it must not use the file any more, and call [Condemn]. It does not wait
// for the disk and takes about 0.3 µs.
func Sound(f *os.File, size int64) error {
	// The range is behind the end, so that there is no page to wait for; the kernel
	// tells of errors all the same.
	err := unix.SyncFileRange(int(f.Fd()), size, 1, unix.SYNC_FILE_RANGE_WAIT_BEFORE)
	if err != nil {
		return fmt.Errorf("the disk did not take what was written to %s (check the disk of the cache folder): %v", f.Name(), err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	if st.Size != size {
		return fmt.Errorf("%s has %d bytes instead of %d: somebody has changed the cache folder", f.Name(), st.Size, size)
	}
	return nil
}

// Condemn sees to it that a data file is not opened again, also by a daemon that is
// started later and is not told of the error. Who has it open goes on until they find
// out themselves.
func Condemn(data string) error {
	err := os.Remove(filepath.Join(filepath.Dir(data), BootFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
