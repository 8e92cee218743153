// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package stranger connects to unix sockets as another user, for tests that such connections are refused.
package stranger

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const nobody = 65534

// Refused connects to a socket as the user nobody, and fails the test unless the server then closes the connection. Modes of the
// socket and of the folder that it is in are loosened first: they would refuse it too. The test must run as root.
func Refused(t *testing.T, network, path string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("becoming another user needs root")
	}
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err != nil || info.Mode()&1 == 0 && os.Chmod(dir, info.Mode()|0o011) != nil {
			t.Fatalf("%s: %v", dir, err)
		}
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	conn, err := dial(network, path)
	if err != nil {
		t.Errorf("user %d cannot try: %v", nobody, err)
		return
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	// The server closes without a word. It may do so before it has read what came, which is a reset.
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("user %d got %d bytes from %s: %v", nobody, n, path, err)
	}
}

// dial connects from a thread that belongs to another user, and ends with it.
func dial(network, path string) (conn net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			err = os.NewSyscallError("setresuid", errno)
			return
		}
		conn, err = net.Dial(network, path)
	}()
	<-done
	return conn, err
}
