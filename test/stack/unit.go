// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	unitName = "thaw-snapshotter.service"
	unitDir  = "/run/stack/units"
	// sdBooted is what systemd takes for the sign that the machine runs it.
	sdBooted = "/run/systemd/system"
	// exitSignal is SIGRTMIN+24, at which systemd exits at once (systemd(1)).
	exitSignal = unix.Signal(34 + 24)

	// startManager is a shell script: its name is the folder of units, its arguments are cgroups.
	startManager = `for c; do echo $$ >$c/cgroup.procs || exit; done
export SYSTEMD_UNIT_PATH=$0 XDG_RUNTIME_DIR=/run XDG_CONFIG_HOME=/var/lib XDG_STATE_HOME=/var/lib
exec /usr/lib/systemd/systemd --user`
)

// Unit is thaw-snapshotter as a service of systemd, with all that its unit file restricts really restricted.
type Unit struct {
	stack   *Stack
	manager *Process
	cgroups []string
}

// StartUnit starts thaw-snapshotter, which must not run, from contrib/systemd with drop-ins from the folder there, and returns when it
// is ready. It is systemd's user manager, run as root, that does it: the system's must be PID 1. The caller must Stop it.
func (s *Stack) StartUnit(ctx context.Context, dropIns ...string) (u *Unit, err error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	// Only the paths are the stack's.
	log := filepath.Join(s.Logs(), "thaw-snapshotter.log")
	paths := fmt.Sprintf("[Service]\nExecStart=\nExecStart=%s\nEnvironment=PATH=%s\nStandardOutput=append:%[3]s\nStandardError=append:%[3]s\n",
		filepath.Join(s.Bin, "thaw-snapshotter"), os.Getenv("PATH"), log)
	if len(dropIns) > 0 { // the unit alone makes no mount namespace, as this would
		paths += "ReadWritePaths=" + s.ThawCache() + "\n"
	}
	files := map[string]string{unitName + ".d/stack.conf": paths}
	for _, target := range []string{"default", "basic", "shutdown"} {
		files[target+".target"] = "[Unit]\nDefaultDependencies=no\n"
	}
	for _, name := range append([]string{unitName}, dropIns...) {
		text, err := os.ReadFile(filepath.Join(root, "contrib", "systemd", name))
		if err != nil {
			return nil, err
		}
		files[name] = string(text)
	}
	for name, text := range files {
		if err := writeFile(filepath.Join(unitDir, name), text); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(os.MkdirAll(sdBooted, 0o755), os.MkdirAll(s.ThawCache(), 0o700)); err != nil {
		return nil, err
	}
	// As on a host: a service that has its own mount namespace must see what is mounted later.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return nil, os.NewSyscallError("mount", err)
	}
	u = &Unit{stack: s}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.Stop(ctx))
		}
	}()
	if u.cgroups, err = makeCgroups(); err != nil {
		return u, err
	}
	u.manager, err = startProcess(ctx, filepath.Join(s.Logs(), "systemd.log"), "sh", append([]string{"-c", startManager, unitDir}, u.cgroups...)...)
	if err != nil {
		return u, err
	}
	_, err = u.systemctl(ctx, "start", unitName)
	return u, err
}

// PID is the daemon's process.
func (u *Unit) PID(ctx context.Context) (pid int, err error) {
	out, err := u.systemctl(ctx, "show", "-p", "MainPID", "--value", unitName)
	if err == nil {
		_, err = fmt.Sscan(out, &pid)
	}
	return pid, err
}

// Stop stops the daemon and systemd.
func (u *Unit) Stop(ctx context.Context) error {
	var err error
	if u.manager.Running() {
		_, err = u.systemctl(ctx, "stop", unitName)
		err = errors.Join(err, unix.Kill(u.manager.PID(), exitSignal))
		select {
		case <-u.manager.Done():
		case <-ctx.Done():
			err = errors.Join(err, ctx.Err(), u.manager.Kill())
		}
	}
	for _, dir := range []string{unitDir, "/run/systemd", "/run/stack/sh.notify"} {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if merr := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); merr != nil {
		err = errors.Join(err, os.NewSyscallError("mount", merr))
	}
	return errors.Join(err, removeCgroups(u.cgroups))
}

// makeCgroups makes cgroups for systemd alone, in the hierarchies that it manages: it takes what is in its own for itself.
func makeCgroups() (dirs []string, err error) {
	for _, h := range []string{"", "unified", "systemd"} { // of version 2, or 1 with both
		h = filepath.Join("/sys/fs/cgroup", h)
		if _, err := os.Stat(filepath.Join(h, "cgroup.procs")); err != nil {
			continue
		}
		dir := filepath.Join(h, "stack-unit")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return dirs, err
		}
		dirs = append(dirs, dir)
	}
	return dirs, nil
}

// removeCgroups removes cgroups with those in them, which have no processes.
func removeCgroups(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		var all []string
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				all = append(all, path)
			}
			return err
		})
		errs = append(errs, err)
		for _, path := range slices.Backward(all) {
			if err := unix.Rmdir(path); err != nil {
				errs = append(errs, &os.PathError{Op: "rmdir", Path: path, Err: err})
			}
		}
	}
	return errors.Join(errs...)
}

func (u *Unit) systemctl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "systemctl", append([]string{"--user"}, args...)...)
	cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR=/run")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s; last line of the daemon's log: %s", args[0], err, strings.TrimSpace(string(out)), (&Process{log: filepath.Join(u.stack.Logs(), "thaw-snapshotter.log")}).lastLog())
	}
	return strings.TrimSpace(string(out)), nil
}
