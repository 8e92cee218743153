// SPDX-License-Identifier: Apache-2.0

// Package lazypages is the server side of the socket on which `criu restore
// --lazy-pages` hands over the userfaultfds of the tasks that it restores.
//
// CRIU connects to the stream socket lazy-pages.socket in its work directory. For
// each task it sends the task's pid as in the image file names, a native-endian
// int32, and then one byte with the userfaultfd as SCM_RIGHTS. A negative pid is a
// zombie, which has no memory and for which no descriptor follows. When all tasks
// are restored it sends the word 0x52535446, and closes the connection
// (criu/uffd.c, CRIU 4.1 and 4.2).
package lazypages

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// SocketName is the socket's name in CRIU's work directory.
	SocketName = "lazy-pages.socket"

	// MaxTasks bounds how many tasks one restore may hand over.
	MaxTasks = 1 << 15

	finished = 0x52535446 // larger than any pid (PID_MAX_LIMIT is 4 Mi)
	maxPID   = 1 << 22
)

// ErrIncomplete is wrapped by the error for a restore that ended before all of
// its tasks were handed over. CRIU's log has the reason.
var ErrIncomplete = errors.New("criu ended before the restore was complete")

// Handler takes what CRIU hands over. Its methods are called one after another.
type Handler interface {
	// Task is called for each task. If it returns nil it owns the descriptor; with
	// an error the session ends.
	Task(pid uint32, uffd int) error
	// Finished is called when CRIU has restored all tasks and is about to let
	// them run.
	Finished()
}

// Listener is a lazy-pages socket that waits for one restore.
type Listener struct {
	dir   *os.File
	sock  *net.UnixListener
	close func() error // once
}

// Listen makes the socket in CRIU's work directory. The directory's path may be
// longer than a socket address. A socket left there by an earlier restore is
// replaced.
func Listen(dir string) (*Listener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lazy-pages socket: %w", err)
	}
	l := &Listener{dir: d}
	if err := l.remove(); err != nil {
		d.Close()
		return nil, fmt.Errorf("lazy-pages socket in %s: removing an old one: %w", dir, err)
	}
	// A socket address has room for 107 bytes, the path of a bundle often more.
	addr := &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName)}
	if l.sock, err = net.ListenUnix("unix", addr); err != nil {
		d.Close()
		return nil, fmt.Errorf("lazy-pages socket %s: %w", filepath.Join(dir, SocketName), err)
	}
	l.sock.SetUnlinkOnClose(false) // that name is good only while d is open
	if err := os.Chmod(addr.Name, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("lazy-pages socket: %w", err), l.sock.Close(), l.remove(), d.Close())
	}
	l.close = sync.OnceValue(func() error {
		return errors.Join(ignoreClosed(l.sock.Close()), l.remove(), l.dir.Close())
	})
	return l, nil
}

func (l *Listener) remove() error {
	err := unix.Unlinkat(int(l.dir.Fd()), SocketName, 0)
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// Close gives up waiting and removes the socket. It may be called more than once.
func (l *Listener) Close() error { return l.close() }

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// accept returns the first connection of a process of this user.
func (l *Listener) accept() (*net.UnixConn, error) {
	for {
		conn, err := l.sock.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, err := peerUser(conn)
		if err == nil && uid == uint32(os.Geteuid()) {
			return conn, nil
		}
		conn.Close()
	}
}

func peerUser(conn *net.UnixConn) (uint32, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, os.NewSyscallError("getsockopt", err)
	}
	return cred.Uid, nil
}

// Serve accepts one connection, of a process of this user, and passes what comes over it to h until CRIU
// closes it. It returns nil if the restore was complete. It ends early with the
// context's error, with an error of h, or with one that wraps ErrIncomplete; then
// the tasks handed over so far must not be let run. The listener is closed in
// any case.
func (l *Listener) Serve(ctx context.Context, h Handler) error {
	defer l.Close()
	stop := context.AfterFunc(ctx, func() { l.sock.Close() })
	conn, err := l.accept()
	stop()
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("waiting for criu on the lazy-pages socket: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := l.Close(); err != nil {
		return fmt.Errorf("lazy-pages socket: %w", err)
	}
	if err := session(conn, h); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	return nil
}

func session(conn *net.UnixConn, h Handler) error {
	if err := checkPeer(conn); err != nil {
		return err
	}
	for tasks := 0; ; tasks++ {
		var word [4]byte
		if _, err := io.ReadFull(conn, word[:]); err != nil {
			return fmt.Errorf("%w, after %d tasks: %w", ErrIncomplete, tasks, err)
		}
		pid := int32(binary.NativeEndian.Uint32(word[:]))
		switch {
		case pid == finished:
			h.Finished()
			return awaitEnd(conn)
		case pid == 0 || pid > maxPID || pid < -maxPID:
			return fmt.Errorf("lazy-pages socket: %#x is no pid: this criu speaks another protocol", uint32(pid))
		case tasks == MaxTasks:
			return fmt.Errorf("lazy-pages socket: more than %d tasks", MaxTasks)
		case pid < 0:
			continue
		}
		fd, err := receive(conn)
		if err != nil {
			return fmt.Errorf("userfaultfd of task %d: %w", pid, err)
		}
		if err := h.Task(uint32(pid), fd); err != nil {
			unix.Close(fd)
			return err
		}
	}
}

// checkPeer refuses a peer of another user: whoever sends the descriptors
// decides whose memory is filled.
func checkPeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return fmt.Errorf("lazy-pages socket: credentials of the peer: %w", credErr)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("lazy-pages socket: connection from user %d refused", cred.Uid)
	}
	return nil
}

func awaitEnd(conn *net.UnixConn) error {
	var b [1]byte
	switch n, err := conn.Read(b[:]); {
	case n > 0:
		return fmt.Errorf("lazy-pages socket: data behind the end of the restore: this criu speaks another protocol")
	case err == io.EOF:
		return nil
	default:
		return fmt.Errorf("lazy-pages socket: %w", err)
	}
}

// receive reads one byte that carries exactly one descriptor.
func receive(conn *net.UnixConn) (int, error) {
	var b [1]byte
	// Room for more than one, so that superfluous ones are seen and closed.
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(b[:], oob)
	if err != nil || n == 0 && oobn == 0 {
		return -1, fmt.Errorf("%w: %w", ErrIncomplete, errors.Join(err, io.ErrUnexpectedEOF))
	}
	fds, err := rights(oob[:oobn])
	switch {
	case err != nil:
	case flags&unix.MSG_CTRUNC != 0:
		err = errors.New("the message was cut off: the shim may be at its limit of open files (LimitNOFILE in containerd's unit)")
	case len(fds) != 1:
		err = fmt.Errorf("%d descriptors where one is expected", len(fds))
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return -1, err
	}
	return fds[0], nil
}

// rights returns all descriptors in a control message, even with an error.
func rights(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET || messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		got, e := unix.ParseUnixRights(&messages[i])
		fds, err = append(fds, got...), errors.Join(err, e)
	}
	return fds, err
}
