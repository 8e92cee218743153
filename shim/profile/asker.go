// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	// container is the name of the container that runc makes, and of its cgroup. There
	// is one at a time on a node, so that what a killed asker left is found again.
	container = "thaw-seccomp"
	// maxSection bounds the seccomp section of a spec, in bytes.
	maxSection = 16 << 20
	// maxAnswers bounds how many answers are kept.
	maxAnswers = 64
)

// Main must be called first in the main function of a program that uses Filter. In a
// process that was started to ask runc it does so and does not return.
func Main() {
	if len(os.Args) != 4 || os.Args[0] != askerName {
		return
	}
	if err := answer(os.Args[1], os.Args[2], os.Args[3], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// answer asks runc what it makes of a seccomp section, and keeps the answer in the
// folder under a key.
func answer(dir, runtime, key string, in io.Reader) error {
	section, err := io.ReadAll(io.LimitReader(in, maxSection))
	if err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	if _, err := os.Stat(filepath.Join(dir, key)); err == nil {
		return nil // somebody else asked meanwhile
	}
	program, err := probe(filepath.Join(dir, "container"), runtime, section)
	if err != nil {
		return err
	}
	if err := forget(dir); err != nil {
		return err
	}
	tmp := filepath.Join(dir, "new")
	if err := os.WriteFile(tmp, program, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, key))
}

// forget makes room for one more answer. The oldest goes.
func forget(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	type aged struct {
		name string
		at   time.Time
	}
	var all []aged
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			all = append(all, aged{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(all, func(a, b aged) int { return a.at.Compare(b.at) })
	for len(all) >= maxAnswers {
		if err := os.Remove(filepath.Join(dir, all[0].name)); err != nil {
			return err
		}
		all = all[1:]
	}
	return nil
}

// probe creates a container with a seccomp section, reads its filter and removes it.
func probe(dir, runtime string, section []byte) (program []byte, err error) {
	// What waits in the container is this process's to wait for.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, os.NewSyscallError("prctl", err)
	}
	p := prober{dir: dir, runtime: runtime}
	if err := p.remove(); err != nil { // of one who was killed
		return nil, err
	}
	defer func() { err = errors.Join(err, p.remove()) }()
	// With no_new_privs runc loads the filter last, when it needs the fewest system
	// calls itself; but versions before 1.1 wait before that. Without, it is loaded early.
	for _, noNewPrivileges := range []bool{true, false} {
		if err := p.create(section, noNewPrivileges); err != nil {
			return nil, err
		}
		if program, err = p.read(); err != nil || program != nil {
			return program, err
		}
		if err := p.remove(); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("a container that it made has no seccomp filter: is this runc built without seccomp?")
}

// prober has a container that waits.
type prober struct {
	dir     string // all that belongs to it
	runtime string
}

func (p *prober) runc(args ...string) error {
	cmd := exec.Command(p.runtime, append([]string{"--root", filepath.Join(p.dir, "state")}, args...)...)
	// The container inherits what standard error is, and would keep a pipe open.
	said, err := os.Create(filepath.Join(p.dir, "said"))
	if err != nil {
		return err
	}
	defer said.Close()
	cmd.Stderr = said
	if err := cmd.Run(); err != nil {
		text := make([]byte, maxReason)
		n, _ := said.ReadAt(text, 0)
		return fmt.Errorf("runc %s: %w: %s", args[0], err, strings.TrimSpace(string(text[:n])))
	}
	return nil
}

// create lets runc make the container. Its root filesystem has what runc looks for
// before it waits: /proc, and a program, which is never started.
func (p *prober) create(section []byte, noNewPrivileges bool) error {
	rootfs := filepath.Join(p.dir, "rootfs")
	if err := os.MkdirAll(rootfs, 0o700); err != nil {
		return err
	}
	spec := specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: rootfs},
		Process: &specs.Process{Cwd: "/", Args: []string{"/program"}, NoNewPrivileges: noNewPrivileges},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			// With a /dev from outside runc makes no devices, which a folder with the mount option nodev would not have.
			{Destination: "/dev", Type: "bind", Source: "/dev", Options: []string{"bind", "ro"}},
			{Destination: "/program", Type: "bind", Source: p.runtime, Options: []string{"bind", "ro"}},
		},
		Linux: &specs.Linux{
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}},
			CgroupsPath: "/" + container,
			Seccomp:     &specs.LinuxSeccomp{},
		},
	}
	if err := json.Unmarshal(section, spec.Linux.Seccomp); err != nil {
		return err
	}
	config, err := json.Marshal(&spec)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(p.dir, "config.json"), config, 0o600); err != nil {
		return err
	}
	return p.runc("create", "--bundle", p.dir, "--pid-file", p.pidFile(), container)
}

func (p *prober) pidFile() string { return filepath.Join(p.dir, "pid") }

// read returns the filter of the container's process; nil if it has none.
func (p *prober) read() ([]byte, error) {
	text, err := os.ReadFile(p.pidFile())
	if err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return nil, fmt.Errorf("runc says that process %.20q is the container's", text)
	}
	program, err := filterOf(pid)
	// runc would have killed it too, and slept. It is this process's child by now.
	return program, errors.Join(err, end(pid))
}

// end kills a child and waits for it.
func end(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	for {
		_, err := unix.Wait4(pid, nil, unix.WALL, nil)
		if err == nil || errors.Is(err, unix.ECHILD) {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("wait4", err)
		}
	}
}

// remove removes the container, if there is one, with all that belongs to it.
func (p *prober) remove() error {
	if _, err := os.Stat(filepath.Join(p.dir, "state", container)); err == nil {
		if err := p.runc("delete", "--force", container); err != nil {
			return err
		}
	}
	return os.RemoveAll(p.dir)
}
