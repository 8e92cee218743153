// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// uffdioAPI is struct uffdio_api of linux/userfaultfd.h, and its ioctl.
type uffdioAPI struct{ api, features, ioctls uint64 }

const (
	uffdAPI      = 0xAA
	uffdioAPINum = 0xc018aa3f // _IOWR(0xAA, 0x3F, struct uffdio_api)
)

// userfaultfdFeatures returns the kernel's userfaultfd features. A userfaultfd
// that was asked once accepts no second set, so it is thrown away.
func userfaultfdFeatures() (uint64, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	defer unix.Close(int(fd))
	a := uffdioAPI{api: uffdAPI}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPINum, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return 0, errno
	}
	return a.features, nil
}
