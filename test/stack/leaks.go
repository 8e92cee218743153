// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"golang.org/x/sys/unix"
)

// State is what is there at one time of the things that a container can leave behind. Each entry is a line that says
// what kind of thing it is.
type State map[string]bool

// State takes stock of processes, mounts, cgroups, network devices and namespaces, sockets and FIFOs on /run, restores, and containerd's
// containers, snapshots and leases. What the stack itself runs on is part of it, so compare two of them.
func (s *Stack) State(ctx context.Context) (State, error) {
	state := make(State)
	err := errors.Join(state.processes(s.containerd, s.daemon), state.mounts(), state.cgroups(), state.devices(), state.files("/run"), s.containerdState(ctx, state))
	return state, err
}

// Leaked lists what is in state and was not before, sorted.
func (state State) Leaked(before State) []string {
	var leaked []string
	for line := range state {
		if !before[line] {
			leaked = append(leaked, line)
		}
	}
	slices.Sort(leaked)
	return leaked
}

// AwaitClean waits until nothing is there that was not before, because containerd and shims tidy up after they have
// answered. When ctx ends first, the error lists what was left.
func (s *Stack) AwaitClean(ctx context.Context, before State) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var leaked []string
	for {
		state, err := s.State(ctx)
		if err == nil {
			if leaked = state.Leaked(before); len(leaked) == 0 {
				return nil
			}
		} else if ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("left behind:\n  %s", strings.Join(leaked, "\n  "))
		case <-tick.C:
		}
	}
}

// RemoveDeadSockets removes the sockets of shims that were killed: containerd leaves them, those of runc's shim as well.
func RemoveDeadSockets() error {
	sockets, err := filepath.Glob("/run/containerd/s/*")
	for _, path := range sockets {
		conn, derr := net.Dial("unix", path)
		if derr == nil {
			conn.Close()
		} else if errors.Is(derr, unix.ECONNREFUSED) {
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err
}

func (state State) add(kind, what string) { state[kind+" "+what] = true }

// processes leaves the stack's servers out: a test may start them anew.
func (state State) processes(servers ...*Process) error {
	return eachProcess(func(pid int, args []string) bool {
		for _, s := range servers {
			if s.Running() && s.PID() == pid {
				return true
			}
		}
		state.add("process", fmt.Sprintf("%d: %s", pid, strings.Join(args, " ")))
		return true
	})
}

// eachProcess calls visit for each process with a command line (so not for kernel threads and zombies) until it returns false.
func eachProcess(visit func(pid int, args []string) bool) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(line) == 0 {
			continue // ended since
		}
		if !visit(pid, strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")) {
			return nil
		}
	}
	return nil
}

func findProcess(match func(args []string) bool) (int, error) {
	found := 0
	err := eachProcess(func(pid int, args []string) bool {
		if match(args) {
			found = pid
		}
		return found == 0
	})
	if err == nil && found == 0 {
		err = errors.New("no such process")
	}
	return found, err
}

func (state State) mounts() error {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for _, line := range strings.Split(string(text), "\n") {
		if fields := strings.Fields(line); len(fields) > 4 {
			state.add("mount", fields[4])
		}
	}
	return nil
}

func (state State) cgroups() error {
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case d.IsDir():
			state.add("cgroup", path)
		}
		return nil
	})
}

func (state State) devices() error {
	devices, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, d := range devices {
		state.add("network device", d.Name)
	}
	return nil
}

// records is the folder of the daemon's restores, which it makes when it starts first.
const records = ThawStateDir + "/restores"

// profiles is the folder of what runc makes of seccomp profiles, which the first restore makes.
const profiles = ThawStateDir + "/seccomp"

// files lists sockets, FIFOs and folders below a folder, without entering mounted root filesystems. Regular files are the
// business of their folders.
func (state State) files(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case d.IsDir() && (d.Name() == "rootfs" || path == filepath.Join(root, ".isolate")):
			return fs.SkipDir
		case path == filepath.Join(ThawStateDir, "images"):
			return fs.SkipDir // images that were laid out stay for the next restore, up to a limit
		case path == records, path == profiles:
		case filepath.Dir(path) == records && strings.HasSuffix(path, ".json"):
			state.add("restore", path)
		case d.IsDir(), d.Type()&(fs.ModeSocket|fs.ModeNamedPipe) != 0, strings.HasPrefix(path, "/run/netns/"):
			state.add("file", path)
		}
		return nil
	})
}

func (s *Stack) containerdState(ctx context.Context, state State) error {
	if s.client == nil {
		return nil
	}
	// Services taken from the client do not add it by themselves.
	ctx = namespaces.WithNamespace(ctx, CRINamespace)
	containers, err := s.client.Containers(ctx)
	if err != nil {
		return err
	}
	for _, c := range containers {
		state.add("container", c.ID())
	}
	leases, err := s.client.LeasesService().List(ctx)
	if err != nil {
		return err
	}
	for _, l := range leases {
		state.add("lease", l.ID)
	}
	names := []string{"overlayfs"}
	if s.daemon.Running() {
		names = append(names, "thaw")
	}
	for _, name := range names {
		err := s.client.SnapshotService(name).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			// Committed ones belong to images and live as long as these.
			if info.Kind != snapshots.KindCommitted {
				state.add("snapshot", name+" "+info.Name)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("snapshotter %s: %w", name, err)
		}
	}
	return nil
}
