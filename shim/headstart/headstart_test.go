// SPDX-License-Identifier: Apache-2.0

package headstart

import (
	"errors"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestBreakpoints(t *testing.T) {
	b := PrepareBreakpoints()
	<-b.opened
	if errors.Is(b.err, unix.EACCES) || errors.Is(b.err, unix.EPERM) || errors.Is(b.err, unix.ENOSYS) {
		t.Skip("no perf events here:", b.err)
	}
	fd := b.fd
	if target, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err != nil || target != "anon_inode:[perf_event]" {
		t.Errorf("descriptor %d is %q, %v", fd, target, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("descriptor %d is still open: %v", fd, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

func TestMoveToCgroup(t *testing.T) {
	before, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	err = MoveToCgroup()
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EROFS) {
		t.Skip("no cgroup to move to:", err)
	}
	if err != nil {
		t.Error(err)
	}
	if after, err := os.ReadFile("/proc/self/cgroup"); err != nil || string(after) != string(before) {
		t.Errorf("it moved: %s", after)
	}
}
