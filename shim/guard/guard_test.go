// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
)

var kills = flag.Int("kills", 15, "how often TestKilledAtRandom kills a page handler")

func TestMain(m *testing.M) {
	Main()
	if arg := os.Getenv(handlerEnv); arg != "" {
		fmt.Fprintln(os.Stderr, "page handler:", handle(arg))
		os.Exit(1)
	}
	flag.Parse()
	code := m.Run()
	if path, err := victim(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// victim builds testdata/victim.c once.
var victim = sync.OnceValues(func() (string, error) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "victim")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "victim")
	if out, err := exec.Command(cc, "-O2", "-Wall", "-Werror", "-o", path, "testdata/victim.c").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

const (
	// handlerEnv makes this test binary a page handler: VICTIM,WHEN,CGROUP.
	handlerEnv = "THAW_GUARD_TEST"

	base, pages, pageSize = 0x100000000000, 16384, 4096 // as in victim.c
)

// handle starts a victim and serves its memory until the process is killed, by itself as
// soon as it has read the event of a fork if when is "fork".
func handle(arg string) error {
	fields := strings.SplitN(arg, ",", 3)
	path, when, cgroup := fields[0], fields[1], fields[2]
	g, err := Start([]string{cgroup})
	if err != nil {
		return err
	}
	fmt.Println("guard", g.pid)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	const enter = `[ ! -d "$1" ] || echo $$ > "$1/cgroup.procs"; exec "$2"`
	cmd := exec.Command("sh", "-c", enter, "sh", cgroup, path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr, cmd.ExtraFiles = os.Stderr, []*os.File{os.NewFile(uintptr(pair[1]), "victim")}
	if err := cmd.Start(); err != nil {
		return err
	}
	cmd.ExtraFiles[0].Close()
	oob := make([]byte, unix.CmsgSpace(4))
	if _, _, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC); err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("%d messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	fmt.Println("victim", cmd.Process.Pid) // which is in the cgroup now
	return serve(uffd.FD(fds[0]), when == "fork")
}

func serve(first uffd.FD, dieAtFork bool) error {
	var events uffd.Buffer
	page := make([]uint64, pageSize/8)
	for poll := []unix.PollFd{{Fd: int32(first), Events: unix.POLLIN}}; ; {
		if _, err := unix.Poll(poll, -1); err != nil && err != unix.EINTR {
			return err
		}
		for i := len(poll) - 1; i >= 0; i-- {
			fd := uffd.FD(poll[i].Fd)
			n, err := fd.Read(&events)
			if err != nil && err != unix.EAGAIN {
				return err
			}
			for j := range n {
				e := events.Event(j)
				if e.Kind == uffd.Fork {
					if dieAtFork {
						_ = unix.Kill(os.Getpid(), unix.SIGKILL)
					}
					poll = append(poll, unix.PollFd{Fd: int32(e.FD), Events: unix.POLLIN})
				}
				if e.Kind != uffd.Pagefault {
					continue
				}
				at := e.Start &^ (pageSize - 1)
				for w := range page {
					page[w] = ^((at - base) / pageSize)
				}
				for {
					_, err := fd.Copy(at, unsafe.Pointer(&page[0]), pageSize)
					if err == unix.EEXIST {
						err = fd.Wake(at, pageSize)
					}
					if err == nil || err == unix.ESRCH {
						break
					}
					if err == unix.EAGAIN { // it forks: the fault comes again
						if err := fd.Wake(at, pageSize); err != nil {
							return err
						}
						break
					}
					return fmt.Errorf("copy: %w", err)
				}
			}
			if !fd.Alive() {
				fd.Close()
				poll = append(poll[:i], poll[i+1:]...)
			}
		}
	}
}

// handler is a running page handler of a victim.
type handler struct {
	t             *testing.T
	cmd           *exec.Cmd
	guard, victim int
	said          chan string // what handler, guard, killer and victims said, when all have ended
}

func startHandler(t *testing.T, when, cgroup string) *handler {
	t.Helper()
	if _, err := uffd.Probe(); err != nil {
		t.Skipf("no userfaultfd with events here (%v): run as root", err)
	}
	path, err := victim()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("no C compiler")
	}
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	h := &handler{t: t, cmd: exec.Command(os.Args[0]), said: make(chan string, 1)}
	h.cmd.Env = append(os.Environ(), handlerEnv+"="+path+","+when+","+cgroup)
	h.cmd.Stderr = w
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer r.Close()
		text, err := io.ReadAll(r)
		h.said <- fmt.Sprint(string(text), err)
	}()
	lines := bufio.NewReader(out)
	for _, p := range []struct {
		name string
		pid  *int
	}{{"guard", &h.guard}, {"victim", &h.victim}} {
		line, err := lines.ReadString('\n')
		name, pid, _ := strings.Cut(strings.TrimSpace(line), " ")
		if *p.pid, _ = strconv.Atoi(pid); name != p.name || *p.pid == 0 {
			t.Fatalf("the page handler said %q, %v", line, err)
		}
	}
	return h
}

func (h *handler) kill() {
	h.t.Helper()
	if err := h.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		h.t.Fatal(err)
	}
	_ = h.cmd.Wait()
}

// allEnded waits until nobody is left, and checks that nobody saw a wrong page.
func (h *handler) allEnded() {
	h.t.Helper()
	select {
	case said := <-h.said:
		if !strings.Contains(said, "the container was killed") || strings.Contains(said, "wrong:") || strings.Contains(said, "page handler:") {
			h.t.Fatal(said)
		}
	case <-time.After(20 * time.Second):
		h.t.Fatal("somebody is left, or has the descriptors")
	}
}

// TestKilledAtRandom kills page handlers of processes that fork without pause.
func TestKilledAtRandom(t *testing.T) {
	dir := testCgroup(t)
	for range *kills {
		h := startHandler(t, "", dir)
		time.Sleep(rand.N(50 * time.Millisecond))
		h.kill()
		h.allEnded()
	}
}

// TestKilledInForkWindow kills page handlers that have just been given the descriptor of a child, which nobody else
// has ever been told of.
func TestKilledInForkWindow(t *testing.T) {
	dir := testCgroup(t)
	for range *kills {
		h := startHandler(t, "fork", dir)
		_ = h.cmd.Wait()
		h.allEnded()
	}
}

// TestNotInCgroup: processes that the killer does not find wait, for they are neither dead nor have their memory.
func TestNotInCgroup(t *testing.T) {
	h := startHandler(t, "", cgroupRoot+"/thaw-guard-test-none")
	time.Sleep(20 * time.Millisecond)
	h.kill()
	select {
	case said := <-h.said:
		t.Fatal(said)
	case <-time.After(200 * time.Millisecond):
	}
	if err := unix.Kill(-h.victim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.allEnded()
}

// TestReplaced: a guard that is killed is replaced, without anybody's harm.
func TestReplaced(t *testing.T) {
	h := startHandler(t, "", testCgroup(t))
	if err := unix.Kill(h.guard, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if children(t, h.cmd.Process.Pid, h.victim, h.guard) == 1 {
			break
		}
		if time.Now().After(limit) {
			t.Fatal("no other guard")
		}
	}
	h.kill()
	select {
	case said := <-h.said:
		if !strings.Contains(said, "another one is started") || strings.Contains(said, "wrong:") {
			t.Error(said)
		}
	case <-time.After(20 * time.Second):
		t.Error("somebody is left")
	}
}

// children counts those of a process, but for some.
func children(t *testing.T, pid int, but ...int) (n int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
next:
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
	list:
		for child := range strings.FieldsSeq(string(text)) {
			for _, b := range but {
				if child == strconv.Itoa(b) {
					continue list
				}
			}
			n++
			continue next
		}
	}
	return n
}

// TestInvisible: a guard looks like one, is nobody's child by accident, opens and closes nothing, and leaves nothing behind.
func TestInvisible(t *testing.T) {
	before := descriptors(t)
	g, err := Start([]string{cgroupRoot + "/thaw-guard-test-none"})
	if err != nil {
		t.Fatal(err)
	}
	proc := fmt.Sprintf("/proc/%d/", g.pid)
	for _, c := range []struct{ file, want string }{
		{"comm", processName}, {"cmdline", processName}, {"syscall", strconv.Itoa(unix.SYS_PPOLL) + " "}, // it waits
	} {
		for limit := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			text, err := os.ReadFile(proc + c.file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(string(text), c.want) {
				break
			}
			if time.Now().After(limit) {
				t.Fatalf("%s is %q", c.file, text)
			}
		}
	}
	if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
		t.Errorf("waited for %d, %v", pid, err)
	}
	if n := descriptors(t); n != before+1 {
		t.Errorf("%d descriptors before, %d with a guard", before, n)
	}
	// Signals for its parent's group do not reach the guard, and others do not end it.
	if sid, err := unix.Getsid(g.pid); err != nil || sid != g.pid {
		t.Errorf("session %d, %v", sid, err)
	}
	for _, s := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGURG} {
		if err := unix.Kill(g.pid, s); err != nil {
			t.Fatal(err)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("what is closed is open in the guard: %d, %v", n, err)
	}
	r.Close()
	if _, err := os.Stat(proc + "fd/0"); err != nil { // which a zombie has not
		t.Errorf("the guard has ended: %v", err)
	}
	pid := g.pid
	g.Stop()
	g.Stop()
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the guard is left: %v", err)
	}
	if pid, err := unix.Wait4(-1, nil, unix.WALL|unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
		t.Errorf("waited for %d, %v", pid, err)
	}
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors before, %d after", before, n)
	}
}

func TestTooLong(t *testing.T) {
	for _, cgroups := range [][]string{nil, {strings.Repeat("x", maxArguments)}, make([]string, maxCgroups+1)} {
		if g, err := Start(cgroups); !errors.Is(err, syscall.E2BIG) {
			t.Errorf("%d cgroups: %v", len(cgroups), err)
			g.Stop()
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// BenchmarkStart is the cost of a guard to a process with some memory.
func BenchmarkStart(b *testing.B) {
	memory := make([]byte, 16<<20)
	for i := 0; i < len(memory); i += pageSize {
		memory[i] = 1
	}
	for b.Loop() {
		g, err := Start([]string{cgroupRoot + "/thaw-guard-test-none"})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		g.Stop()
		b.StartTimer()
	}
}

const cgroupRoot = "/sys/fs/cgroup"

// testCgroup makes a cgroup where this machine lets us.
func testCgroup(t *testing.T) string {
	t.Helper()
	for _, parent := range []string{cgroupRoot + "/freezer", cgroupRoot + "/unified", cgroupRoot} {
		if _, err := os.Stat(filepath.Join(parent, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(parent, "thaw-guard-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() {
			if err := unix.Rmdir(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Skip("no cgroup can be made here: root is needed")
	return ""
}
