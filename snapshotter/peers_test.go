// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"net"
	"path/filepath"
	"testing"

	"thaw.dev/thaw/test/stranger"
)

// TestStranger: processes of other users are served by none of the daemon's sockets, whatever their modes.
func TestStranger(t *testing.T) {
	cfg := testConfig(t)
	stop := run(t, cfg)
	stranger.Refused(t, "unix", cfg.Socket())
	stranger.Refused(t, "unixpacket", cfg.KeeperSocket())
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestSameUser is of the snapshots service's socket.
func TestSameUser(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	served := make(chan string)
	go func() {
		defer close(served)
		for {
			c, err := sameUser{l, t.Context()}.Accept()
			if err != nil {
				return
			}
			p := make([]byte, 8)
			n, _ := c.Read(p)
			c.Close()
			served <- string(p[:n])
		}
	}()
	stranger.Refused(t, "unix", path)
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("mine")); err != nil {
		t.Fatal(err)
	}
	if got := <-served; got != "mine" {
		t.Errorf("served %q", got)
	}
}
