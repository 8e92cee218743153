// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// serve runs a server that tells of kills instead of doing them.
func serve(t *testing.T, path string) (killed chan []string, stop func()) {
	t.Helper()
	s, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	killed = make(chan []string, 1)
	s.kill = func(_ context.Context, cgroups []string) error {
		killed <- cgroups
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
		c.Hold(t.Context(), id, int(w.Fd()))
		w.Close()
	}
	c.Forget(t.Context(), 1)
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
		t.Errorf("%q were killed after an orderly end", k)
	default:
	}
}

func nobody(t *testing.T, killed chan []string) {
	t.Helper()
	select {
	case k := <-killed:
		t.Errorf("%q were killed", k)
	default:
	}
}

// shimEnv makes this test binary a shim that holds its descriptor 3 and lives on.
const shimEnv = "THAW_KEEPER_TEST_SOCKET"

func TestMain(m *testing.M) {
	path := os.Getenv(shimEnv)
	if path == "" {
		os.Exit(m.Run())
	}
	c, err := Dial(path, box)
	if err == nil {
		c.Hold(context.Background(), 1, 3)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(1)
}

// TestDeadShimKills: a shim that dies takes its container with it, and only then the descriptors go.
func TestDeadShimKills(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	defer stop()
	r, w := pipe(t)
	shim := exec.Command(os.Args[0])
	shim.Env, shim.ExtraFiles = append(os.Environ(), shimEnv+"="+path), []*os.File{w}
	if _, err := shim.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := shim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := shim.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	w.Close()
	if !isHeld(r) || line != "held\n" {
		t.Errorf("the shim says %q, %v", line, err)
	}
	nobody(t, killed)
	if err := shim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = shim.Wait()
	if k := <-killed; len(k) != 1 || k[0] != box.Cgroups[0] {
		t.Errorf("killed %q", k)
	}
	atEnd(t, r)
}

// broken breaks a client's connection as a missing answer does.
func broken(c *Client) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil {
		c.link.conn.Close()
	}
}

// TestBrokenConnectionKillsNobody: the shim lives, so it connects again, and what the new connection brings replaces what
// came over the old one.
func TestBrokenConnectionKillsNobody(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	defer stop()
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	r1, w1 := pipe(t)
	r2, w2 := pipe(t)
	c.Hold(t.Context(), 1, int(w1.Fd()))
	broken(c)
	c.Hold(t.Context(), 2, int(w2.Fd())) // over the new connection
	w1.Close()
	w2.Close()
	if !isHeld(r1) || !isHeld(r2) {
		t.Error("not all is held after the connection broke")
	}
	c.Forget(t.Context(), 1)
	atEnd(t, r1)
	broken(c)
	c.Forget(t.Context(), 2) // whatever state the connection is in
	if err := c.Done(); err != nil {
		t.Error(err)
	}
	atEnd(t, r2)
	nobody(t, killed)
}

// TestHoldsOn: what came over a broken connection is held until a later one of the same restore is complete; one that
// breaks before that adds nothing.
func TestHoldsOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	var reads []*os.File
	for _, tc := range []struct {
		restore  string
		complete bool
		held     []bool // of this connection's descriptor and those before
	}{
		{"ns/new", false, []bool{true}},
		{"ns/box", true, []bool{true, true}},
		{"ns/box", false, []bool{true, true, false}},
		{"ns/other", true, []bool{true, true, false, true}},
		{"ns/box", true, []bool{true, false, false, true, true}},
	} {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: path})
		if err != nil {
			t.Fatal(err)
		}
		r, w := pipe(t)
		reads = append(reads, r)
		l := &link{conn: conn, replies: make(chan reply, 1), broken: make(chan struct{})}
		go l.read()
		for _, m := range []message{{Container: Container{RestoreID: tc.restore, Cgroups: box.Cgroups}}, {Hold: 1}, {Complete: tc.complete}} {
			fd := -1
			if m.Hold != 0 {
				fd = int(w.Fd())
			}
			if err := l.exchange(m, fd); err != nil {
				t.Fatal(err)
			}
		}
		w.Close()
		conn.Close()
		<-l.broken
		for i, want := range tc.held {
			if !want {
				atEnd(t, reads[i])
			} else if !isHeld(reads[i]) {
				t.Errorf("%+v: descriptor %d is not held", tc, i)
			}
		}
	}
	stop()
	for _, r := range reads {
		atEnd(t, r)
	}
	nobody(t, killed)
}

// TestDaemonAway: calls wait for a daemon that is away as long as they may, and what was given up or forgotten meanwhile
// does not come back with it.
func TestDaemonAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	stay, wStay := pipe(t)
	forget, wForget := pipe(t)
	late, wLate := pipe(t)
	for id, w := range map[uint64]*os.File{1: wStay, 2: wForget} {
		c.Hold(t.Context(), id, int(w.Fd()))
	}
	stop()
	away, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	c.Hold(away, 3, int(wLate.Fd()))
	c.Forget(away, 3)
	forgotten := make(chan struct{})
	go func() {
		c.Forget(t.Context(), 2)
		close(forgotten)
	}()
	killed2, stop2 := serve(t, path)
	defer stop2()
	<-forgotten
	for _, w := range []*os.File{wStay, wForget, wLate} {
		w.Close()
	}
	atEnd(t, forget)
	atEnd(t, late)
	if !isHeld(stay) {
		t.Error("the new daemon does not hold what is to be held")
	}
	if err := c.Done(); err != nil {
		t.Fatal(err)
	}
	nobody(t, killed)
	nobody(t, killed2)
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
	c.Hold(t.Context(), 1, int(w.Fd()))
	stop()
	killed2, stop2 := serve(t, path)
	defer stop2()
	r2, w2 := pipe(t)
	c.Hold(t.Context(), 2, int(w2.Fd())) // waits for the new connection
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
	for _, k := range []chan []string{killed, killed2} {
		nobody(t, k)
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
	c.Hold(t.Context(), 7, int(w.Fd()))
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
	for i, want := range []message{{Container: box}, {Hold: 7}, {Complete: true}, {Forget: 7}, {Done: true}} {
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		var got message
		if err := json.Unmarshal(buf[:n], &got); err != nil || got.Hold != want.Hold || got.Forget != want.Forget || got.Complete != want.Complete || got.Done != want.Done {
			t.Fatalf("message %d: %s, %v", i, buf[:n], err)
		}
		if i == 0 { // by now it is settled what the new daemon gets
			go func() {
				c.Forget(t.Context(), 7)
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
	c.Hold(t.Context(), 1, int(w.Fd()))
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

// TestPidfdByNumber: a number whose process may be another's by now is not trusted.
func TestPidfdByNumber(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	fd, err := pidfdByNumber(pair[0], os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	unix.Close(pair[1])
	if fd, err := pidfdByNumber(pair[0], os.Getpid()); err == nil {
		unix.Close(fd)
		t.Error("the other end is closed")
	}
}

// TestOutOfDescriptors: a connection that cannot be taken for a lack of descriptors ends neither the server nor what it holds.
func TestOutOfDescriptors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	killed, stop := serve(t, path)
	defer stop()
	r, w := pipe(t)
	c, err := Dial(path, box)
	if err != nil {
		t.Fatal(err)
	}
	c.Hold(t.Context(), 1, int(w.Fd()))
	w.Close()
	next, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(next)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(next, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Error(err)
	}
	<-time.After(acceptPause / 2) // within which the server has tried
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if !isHeld(r) {
		t.Error("the descriptor was let go of")
	}
	// The one that waited is served, and the server goes on.
	if _, err := unix.Write(next, []byte("{}")); err != nil {
		t.Error(err)
	}
	if n, err := unix.Read(next, make([]byte, 100)); err != nil || n == 0 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if err := c.Done(); err != nil {
		t.Error(err)
	}
	nobody(t, killed)
	atEnd(t, r)
}
