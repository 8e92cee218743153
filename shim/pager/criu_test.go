// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/criu/lazypages"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// findCRIU returns a criu that can restore lazily here, or skips the test.
func findCRIU(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("criu needs root")
	}
	path, err := filepath.Abs("../../build/bin/criu")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		if path, err = exec.LookPath("criu"); err != nil {
			t.Skip("no criu: run `make deps`")
		}
	}
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		t.Skipf("%s does not run: %v", path, err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(string(out), "Version: %d.%d", &major, &minor); err != nil || major < 4 || major == 4 && minor < 1 {
		t.Skipf("%s is too old, 4.1 is needed: %s", path, out)
	}
	return path
}

// criu runs a command of criu and fails the test with its log.
func criu(t *testing.T, path, log string, args ...string) {
	t.Helper()
	if out, err := exec.Command(path, append(args, "-v4", "-o", filepath.Base(log))...).CombinedOutput(); err != nil {
		text, _ := os.ReadFile(log)
		if len(text) > 4000 {
			text = text[len(text)-4000:]
		}
		t.Fatalf("criu %s: %v\n%s\n%s", args[0], err, out, text)
	}
}

// lazyImages makes of a dump what a restore gets: images whose pages files hold
// only the eager pages, and the rest as a checkpoint.
func lazyImages(t *testing.T, from, to string) *checkpoint {
	t.Helper()
	d, err := image.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	maps, err := d.Pagemaps()
	if err != nil {
		t.Fatal(err)
	}
	names, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if strings.HasPrefix(n.Name(), "pages-") || !n.Type().IsRegular() {
			continue
		}
		b, err := os.ReadFile(filepath.Join(from, n.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, n.Name()), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := &checkpoint{index: &pageindex.Index{}, fetched: map[Chunk]int{}, data: make([][]byte, 1)}
	for _, m := range maps {
		pages, err := d.OpenPages(m)
		if err != nil {
			t.Fatal(err)
		}
		var eager bytes.Buffer
		if err := m.CompactEager(&eager, pages); err != nil {
			t.Fatal(err)
		}
		dst, err := os.Create(filepath.Join(to, m.File()))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.ExpandEager(dst, &eager); err != nil {
			t.Fatal(err)
		}
		dst.Close()
		proc := pageindex.Process{PID: uint32(m.ID)}
		for r := range m.Lazy() {
			proc.Runs = append(proc.Runs, pageindex.Run{Start: r.Start, Pages: r.Pages, Page: uint64(len(c.data[0])) / pageSize})
			b := make([]byte, r.Pages*pageSize)
			if _, err := pages.ReadAt(b, r.Offset); err != nil {
				t.Fatal(err)
			}
			c.data[0] = append(c.data[0], b...)
		}
		pages.Close()
		if !m.Shared {
			c.index.Processes = append(c.index.Processes, proc)
		}
	}
	c.finish(t, 16)
	return c
}

// A process tree that CRIU restores lazily: threads, a forked child and memory
// operations afterwards, and then a second generation, dumped after Fill.
func TestCRIU(t *testing.T) {
	path := findCRIU(t)
	const pages = 8192
	// What criu restores in the background becomes a child of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	exe, err := victimPath()
	if err != nil {
		t.Skip("no C compiler")
	}
	dir := t.TempDir()
	start := filepath.Join(dir, "start")
	if err := unix.Mkfifo(start, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	// Content that the victim makes itself, before it waits in its fifo to be told
	// to go on.
	cmd := exec.Command("setsid", exe, strconv.FormatUint(victimBase, 10), strconv.Itoa(pages), "torture", "1", "300", start)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, "/"
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	alive := true
	t.Cleanup(func() {
		if alive {
			unix.Kill(-pid, unix.SIGKILL)
		}
	})
	waitFor(t, out, "waiting")
	dump := func(generation int) *checkpoint {
		images, lazy := filepath.Join(dir, fmt.Sprint("dump", generation)), filepath.Join(dir, fmt.Sprint("images", generation))
		for _, d := range []string{images, lazy} {
			if err := os.Mkdir(d, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		criu(t, path, filepath.Join(images, "dump.log"), "dump", "-t", strconv.Itoa(pid), "-D", images)
		return lazyImages(t, images, lazy)
	}
	cp := dump(1)
	cmd.Wait()
	restore := func(generation int, cp *checkpoint) *Pager {
		lazy, work := filepath.Join(dir, fmt.Sprint("images", generation)), filepath.Join(dir, fmt.Sprint("work", generation))
		if err := os.Mkdir(work, 0o700); err != nil {
			t.Fatal(err)
		}
		p, err := New(Config{Index: cp.index, Stores: cp.stores, Fetcher: slow{cp, 2 * time.Millisecond}, Policy: Lazy, OnFatal: func(err error) {
			t.Error(err)
			unix.Kill(-pid, unix.SIGKILL)
		}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := lazypages.Listen(work)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		served := make(chan error, 1)
		go func() { served <- l.Serve(ctx, tasks{p}) }()
		began := time.Now()
		criu(t, path, filepath.Join(work, "restore.log"), "restore", "--lazy-pages", "-d", "-D", lazy, "-W", work)
		t.Logf("restored in %v", time.Since(began))
		if err := <-served; err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := restore(1, cp)
	if s := p.Stats(); s.PagesTotal < pages/2 {
		t.Errorf("%+v: hardly anything is lazy", s)
	}
	// A second generation: all memory first, or the dump would miss it.
	if err := p.Fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", p.Stats())
	cp = dump(2)
	p.Close()
	reap(t, pid)
	p = restore(2, cp)
	f, err := os.OpenFile(start, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	f.Close()
	waitFor(t, out, "right")
	t.Logf("%+v", p.Stats())
	if s := p.Stats(); s.RemoteFaults == 0 {
		t.Error("no page came lazily")
	}
	unix.Kill(-pid, unix.SIGKILL)
	alive = false
	reap(t, pid)
	p.Close()
}

// reap waits for the end of a process that criu left to this one.
func reap(t *testing.T, pid int) {
	t.Helper()
	for {
		switch _, err := unix.Wait4(pid, nil, 0, nil); err {
		case nil:
			return
		case unix.EINTR:
		default:
			t.Fatal(err)
		}
	}
}

type tasks struct{ *Pager }

func (h tasks) Task(pid uint32, fd int) error { return h.Add(pid, fd) }
func (h tasks) Finished()                     { h.Restored() }

// waitFor waits until the victim has written a line.
func waitFor(t *testing.T, out *os.File, line string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for limit := time.Now().Add(time.Minute); time.Now().Before(limit); <-tick.C {
		b, err := io.ReadAll(io.NewSectionReader(out, 0, 1<<20))
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if strings.Contains(string(b), line+"\n") {
			return
		}
		if strings.Contains(string(b), "victim ") {
			t.Fatalf("%s", b)
		}
	}
	t.Fatalf("the victim did not say %q", line)
}
