// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// maxFarewell is what a pipe takes at once or not at all, so that the line is never mixed with the container's own.
const maxFarewell = 4096

// farewell writes a line to the container's standard error, as containerd named it in the request to create the task.
// It is the only way from here to who looks at the pod: an exit has no text. containerd may not read, and nothing must
// wait for it; then the line is lost. Standard errors other than named pipes, such as loggers of ctr, get none.
func farewell(path, line string) error {
	if path == "" {
		return nil
	}
	line = strings.ToValidUTF8(line[:min(len(line), maxFarewell-1)], "") + "\n"
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT { // a logger's URI
		return nil
	}
	if err != nil {
		return fmt.Errorf("standard error of the container: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("standard error of the container: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil
	}
	if _, err := unix.Write(fd, []byte(line)); err != nil {
		return fmt.Errorf("standard error of the container: %w", err)
	}
	return nil
}
