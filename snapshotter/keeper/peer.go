// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// peer is the process that made a connection.
type peer struct {
	pid int32
	fd  *os.File // pidfd
}

// peerOf returns the process at the other end, which must belong to this user.
func peerOf(c *net.UnixConn) (peer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return peer{}, err
	}
	var cred *unix.Ucred
	pidfd := -1
	cerr := raw.Control(func(s uintptr) {
		if cred, err = unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		if cred.Uid != uint32(os.Geteuid()) {
			err = fmt.Errorf("process %d belongs to user %d", cred.Pid, cred.Uid)
			return
		}
		pidfd, err = pidfdOf(int(s), int(cred.Pid))
	})
	if err := errors.Join(cerr, err); err != nil {
		return peer{}, fmt.Errorf("the connection's other end: %w", err)
	}
	// Non-blocking, so that Go's poller waits for it.
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return peer{}, err
	}
	return peer{pid: cred.Pid, fd: os.NewFile(uintptr(pidfd), "pidfd")}, nil
}

// pidfdOf returns a pidfd of the process that made a connection.
func pidfdOf(socket, pid int) (int, error) {
	fd, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if !errors.Is(err, unix.ENOPROTOOPT) {
		return fd, err
	}
	return pidfdByNumber(socket, pid) // Linux before 6.5
}

// pidfdByNumber makes sure that the number was that process's: it is for as long
// as the process has the other end open.
func pidfdByNumber(socket, pid int) (int, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, err
	}
	if readable(socket, unix.POLLRDHUP) {
		unix.Close(fd)
		return -1, net.ErrClosed
	}
	return fd, nil
}

// awaitDeath waits until the process is dead, and returns whether it is when the
// context ends.
func (p peer) awaitDeath(ctx context.Context) bool {
	defer context.AfterFunc(ctx, func() { _ = p.fd.SetReadDeadline(time.Unix(1, 0)) })()
	raw, err := p.fd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { return readable(int(fd), unix.POLLIN) })
	}
	if err != nil && ctx.Err() == nil {
		<-ctx.Done() // who can not be watched is not killed, and nothing closes
	}
	return readable(int(p.fd.Fd()), unix.POLLIN)
}

// readable reports whether poll(2) has the events of a descriptor now. A pidfd is
// readable when its process is dead (pidfd_open(2)).
func readable(fd int, events int16) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 0)
	return err == nil && n > 0
}
