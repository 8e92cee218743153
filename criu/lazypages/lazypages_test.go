// SPDX-License-Identifier: Apache-2.0

package lazypages

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

type record struct {
	pids     []uint32
	finished int
	fail     error
}

func (r *record) Task(pid uint32, fd int) error {
	if r.fail != nil {
		return r.fail
	}
	r.pids = append(r.pids, pid)
	return unix.Close(fd)
}

func (r *record) Finished() { r.finished++ }

// longDir is a directory whose path does not fit a socket address.
func longDir(t *testing.T) string {
	t.Helper()
	d := filepath.Join(t.TempDir(), strings.Repeat("x", 120))
	if err := os.Mkdir(d, 0o700); err != nil {
		t.Fatal(err)
	}
	return d
}

func dial(t *testing.T, dir string) *net.UnixConn {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func word(v int32) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(v)) }

// send sends a word and, if fds are given, a byte with them.
func send(t *testing.T, c *net.UnixConn, v int32, fds ...int) {
	t.Helper()
	if _, err := c.Write(word(v)); err != nil {
		t.Fatal(err)
	}
	if len(fds) > 0 {
		if _, _, err := c.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// null returns a descriptor to send.
func null(t *testing.T) int {
	t.Helper()
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return int(f.Fd())
}

func TestSessions(t *testing.T) {
	fail := errors.New("no such process in the page index")
	fd := null(t)
	for _, c := range []struct {
		name string
		h    record
		talk func(c *net.UnixConn)
		want func(r *record, err error) bool
	}{
		{
			"complete",
			record{},
			func(c *net.UnixConn) {
				send(t, c, 17, fd)
				send(t, c, -18)
				send(t, c, 19, fd)
				send(t, c, finished)
			},
			func(r *record, err error) bool {
				return err == nil && r.finished == 1 && len(r.pids) == 2 && r.pids[0] == 17 && r.pids[1] == 19
			},
		},
		{
			"nothing",
			record{},
			func(*net.UnixConn) {},
			func(r *record, err error) bool { return errors.Is(err, ErrIncomplete) && r.finished == 0 },
		},
		{
			"ends between tasks",
			record{},
			func(c *net.UnixConn) { send(t, c, 17, fd) },
			func(r *record, err error) bool { return errors.Is(err, ErrIncomplete) && len(r.pids) == 1 },
		},
		{
			"ends before the descriptor",
			record{},
			func(c *net.UnixConn) { send(t, c, 17) },
			func(r *record, err error) bool { return errors.Is(err, ErrIncomplete) && len(r.pids) == 0 },
		},
		{
			"half a word",
			record{},
			func(c *net.UnixConn) { c.Write([]byte{1, 2}) },
			func(r *record, err error) bool { return errors.Is(err, ErrIncomplete) },
		},
		{
			"no descriptor",
			record{},
			func(c *net.UnixConn) { send(t, c, 17); c.Write([]byte{0}) },
			func(r *record, err error) bool { return err != nil && strings.Contains(err.Error(), "0 descriptors") },
		},
		{
			"two descriptors",
			record{},
			func(c *net.UnixConn) { send(t, c, 17, fd, fd) },
			func(r *record, err error) bool { return err != nil && strings.Contains(err.Error(), "2 descriptors") },
		},
		{
			"too many descriptors",
			record{},
			func(c *net.UnixConn) { send(t, c, 17, fd, fd, fd, fd, fd, fd, fd) },
			func(r *record, err error) bool { return err != nil && len(r.pids) == 0 },
		},
		{
			"no pid",
			record{},
			func(c *net.UnixConn) { send(t, c, 0) },
			func(r *record, err error) bool { return err != nil && !errors.Is(err, ErrIncomplete) },
		},
		{
			"no protocol",
			record{},
			func(c *net.UnixConn) { send(t, c, 0x20544547) },
			func(r *record, err error) bool { return err != nil && r.finished == 0 },
		},
		{
			"data behind the end",
			record{},
			func(c *net.UnixConn) { send(t, c, finished); send(t, c, 17) },
			func(r *record, err error) bool { return err != nil && !errors.Is(err, ErrIncomplete) },
		},
		{
			"handler refuses",
			record{fail: fail},
			func(c *net.UnixConn) { send(t, c, 17, fd) },
			func(r *record, err error) bool { return errors.Is(err, fail) },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := longDir(t)
			before := descriptors(t)
			l, err := Listen(dir)
			if err != nil {
				t.Fatal(err)
			}
			r := c.h
			result := make(chan error)
			go func() { result <- l.Serve(t.Context(), &r) }()
			conn := dial(t, dir)
			c.talk(conn)
			conn.Close()
			err = <-result
			t.Log(err)
			if !c.want(&r, err) {
				t.Errorf("pids %v, finished %d, error %v", r.pids, r.finished, err)
			}
			if after := descriptors(t); after != before {
				t.Errorf("%d descriptors before, %d after", before, after)
			}
			if _, err := os.Lstat(filepath.Join(dir, SocketName)); !os.IsNotExist(err) {
				t.Errorf("the socket is still there: %v", err)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	for _, connect := range []bool{false, true} {
		dir := longDir(t)
		l, err := Listen(dir)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error)
		go func() { result <- l.Serve(ctx, &record{}) }()
		if connect {
			c := dial(t, dir)
			defer c.Close()
			send(t, c, 17, null(t))
		}
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Errorf("connected %v: %v", connect, err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestListenReplacesOldSocket(t *testing.T) {
	dir := longDir(t)
	for range 2 {
		if _, err := Listen(dir); err != nil { // not closed: as after a crash
			t.Fatal(err)
		}
	}
	if _, err := Listen(filepath.Join(dir, "missing")); !os.IsNotExist(errors.Unwrap(err)) {
		t.Errorf("missing directory: %v", err)
	}
}
