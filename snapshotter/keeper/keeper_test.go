// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// serve runs a server that tells of kills instead of doing them.
func serve(t *testing.T, path string) (killed chan Container, stop func()) {
	t.Helper()
	s, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	killed = make(chan Container, 1)
	s.kill = func(_ context.Context, c Container, _ *os.File) error {
		killed <- c
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx) }()
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	return killed, stop
}

// pipe returns the two ends; when all duplicates of w are closed, r is at its end.
func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// atEnd waits until the read end is at its end: nobody holds the other one.
func atEnd(t *testing.T, r *os.File) {
	t.Helper()
	if err := r.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := r.Read(make([]byte, 1)); n != 0 || err == nil || os.IsTimeout(err) {
		t.Fatalf("the descriptor is still held: %d, %v", n, err)
	}
}

// isHeld says whether somebody still holds the other end.
func isHeld(r *os.File) bool {
	fds := []unix.PollFd{{Fd: int32(r.Fd()), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 0
}

var box = Container{RestoreID: "ns/box", Cgroups: []string{"/sys/fs/cgroup/pids/box"}}

func TestForgetAndDone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	defer stop()
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	r1, w1 := pipe(t)
	r2, w2 := pipe(t)
	for id, w := range map[uint64]*os.File{1: w1, 2: w2} {
		if err := c.Hold(id, int(w.Fd()), 0); err != nil {
			t.Fatal(err)
		}
		w.Close()
	}
	c.Forget(1)
	atEnd(t, r1)
	if !isHeld(r2) {
		t.Error("the other descriptor was closed too")
	}
	if err := c.Done(); err != nil {
		t.Fatal(err)
	}
	atEnd(t, r2)
	select {
	case k := <-killed:
		t.Errorf("%s was killed after an orderly end", k.RestoreID)
	default:
	}
}

// TestDeadShimKills: a connection that ends without Done ends the container, and only then the descriptors.
func TestDeadShimKills(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	defer stop()
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	r, w := pipe(t)
	if err := c.Hold(1, int(w.Fd()), 0); err != nil {
		t.Fatal(err)
	}
	w.Close()
	c.mu.Lock()
	l := c.link
	c.mu.Unlock()
	l.conn.Close() // as good as dead: nothing can be said any more
	close(c.done)
	if k := <-killed; k.RestoreID != box.RestoreID || len(k.Cgroups) != 1 || k.Cgroups[0] != box.Cgroups[0] {
		t.Errorf("killed %+v", k)
	}
	atEnd(t, r)
}

// TestDaemonRestart: a new daemon gets what the old one held, without anybody being killed.
func TestDaemonRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	r, w := pipe(t)
	if err := c.Hold(1, int(w.Fd()), 0); err != nil {
		t.Fatal(err)
	}
	stop()
	killed2, stop2 := serve(t, path)
	defer stop2()
	r2, w2 := pipe(t)
	if err := c.Hold(2, int(w2.Fd()), 0); err != nil { // waits for the new connection
		t.Fatal(err)
	}
	w.Close()
	w2.Close()
	if !isHeld(r) || !isHeld(r2) {
		t.Error("the new daemon does not hold what the old one held")
	}
	if err := c.Done(); err != nil {
		t.Fatal(err)
	}
	atEnd(t, r)
	atEnd(t, r2)
	for _, k := range []chan Container{killed, killed2} {
		select {
		case c := <-k:
			t.Errorf("%s was killed", c.RestoreID)
		default:
		}
	}
}

// TestForgetDuringReconnect: what is given up while the client connects again is not held by the new daemon.
func TestForgetDuringReconnect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	_, stop := serve(t, path)
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	_, w := pipe(t)
	if err := c.Hold(7, int(w.Fd()), 0); err != nil {
		t.Fatal(err)
	}
	stop()
	_ = os.Remove(path)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	forgotten := make(chan struct{})
	buf := make([]byte, maxMessage)
	for i, want := range []message{{Container: box}, {Hold: 7}, {Forget: 7}, {Done: true}} {
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		var got message
		if err := json.Unmarshal(buf[:n], &got); err != nil || got.Hold != want.Hold || got.Forget != want.Forget || got.Done != want.Done {
			t.Fatalf("message %d: %s, %v", i, buf[:n], err)
		}
		if i == 0 { // by now it is settled what the new daemon gets
			go func() {
				c.Forget(7)
				close(forgotten)
				_ = c.Done()
			}()
		}
		if _, err := conn.Write([]byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	<-forgotten
}

// TestHoldNeedsSomebodyToKill: without a cgroup nothing could be done when the shim dies.
func TestHoldNeedsSomebodyToKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	_, stop := serve(t, path)
	defer stop()
	c, err := Dial(path, Container{RestoreID: "r"})
	if err != nil {
		t.Fatal(err)
	}
	r, w := pipe(t)
	if err := c.Hold(1, int(w.Fd()), 0); err == nil {
		t.Error("a descriptor was taken for nobody's memory")
	}
	w.Close()
	atEnd(t, r)
	if err := c.Done(); err != nil {
		t.Error(err)
	}
}

// TestKillOnlyCgroups does not try the root itself: a mistake would kill the machine.
func TestKillOnlyCgroups(t *testing.T) {
	if err := Kill(t.Context(), []string{filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("a folder outside of the cgroups was taken for one")
	}
}

func TestRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	_, stop := serve(t, path)
	defer stop()
	for _, dir := range []string{"/", "/sys/fs/cgroup", "/sys/fs/cgroup/", "/sys/fs/cgroup/../x", "/etc", "pids/box"} {
		if c, err := Dial(path, Container{RestoreID: "r", Cgroups: []string{dir}}); err == nil {
			t.Errorf("%s was taken for a cgroup", dir)
			_ = c.Done()
		}
	}
	if _, err := Dial(filepath.Join(t.TempDir(), "none.sock"), box); err == nil {
		t.Error("connected to nobody")
	}
}
