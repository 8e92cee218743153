// SPDX-License-Identifier: Apache-2.0

// Package verify compares what the kernel shows of a restored container with the
// container's spec.
//
// Before a restore, CRIU's images are compared with the spec (criu/admit). This is
// the second look, at what CRIU made of them: it is to find mistakes of CRIU, and of
// how thaw reads its images. The rules are the same.
package verify

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/admit"
	"thaw.dev/thaw/criu/image"
)

const (
	// maxShown is how many differences an error's text names.
	maxShown = 3
	// limits is how many resource limits there are (asm-generic/resource.h).
	limits = 16
)

// Container compares all processes in a container's cgroup that are in another PID
// namespace than this process with the spec: so CRIU, which is there too as long as the restore
// goes on, is not among them. It returns their PIDs. The cgroup is the first of the folders
// that exists. Processes that end meanwhile are passed over.
//
// It is for a spec for which admit.Check has accepted the images, and for the time from when
// CRIU has set all that it compares, which is before the processes run. It takes some tens of
// microseconds for each thread. A difference is an errdefs.ErrFailedPrecondition whose text
// names task, field, what the kernel shows and what the spec has.
func Container(spec *specs.Spec, cgroups []string) ([]int, error) {
	l := looker{proc: "/proc", spec: spec}
	pids, err := listed(cgroups)
	if err != nil {
		return nil, fmt.Errorf("compare the restored processes with the spec: %w", err)
	}
	if err := l.own(); err != nil {
		return nil, fmt.Errorf("compare the restored processes with the spec: %w", err)
	}
	var seen []int
	var tasks []image.Task
	var found []string
	for _, pid := range pids {
		t, differences, err := l.process(pid)
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("compare the restored processes with the spec: process %d: %w", pid, err)
		}
		if t != nil {
			seen, tasks, found = append(seen, pid), append(tasks, *t), append(found, differences...)
		}
	}
	for _, d := range admit.Running(tasks, spec) {
		found = append(found, fmt.Sprintf("%s: %s: the restored one has %s, the pod's spec has %s", d.Task, d.Field, d.Image, d.Spec))
	}
	if len(found) == 0 {
		return seen, nil
	}
	text := strings.Join(found[:min(maxShown, len(found))], " | ")
	if more := len(found) - maxShown; more > 0 {
		text += fmt.Sprintf(" (and %d more)", more)
	}
	return nil, fmt.Errorf("the restored container is not what its spec grants: %s: report this, with the node's version of CRIU (criu --version): %w", text, errdefs.ErrFailedPrecondition)
}

// gone reports whether a process or thread has ended while it was looked at.
func gone(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// listed returns the processes of the first of the cgroups that exists.
func listed(cgroups []string) ([]int, error) {
	for _, dir := range cgroups {
		p, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var pids []int
		for f := range strings.FieldsSeq(string(p)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("%s/cgroup.procs: %w", dir, err)
			}
			if pid > 0 { // 0 is one that this process's PID namespace does not have
				pids = append(pids, pid)
			}
		}
		return pids, nil
	}
	return nil, fmt.Errorf("the container's cgroup does not exist: %s", strings.Join(cgroups, ", "))
}

// looker looks at processes.
type looker struct {
	proc string // where procfs is
	spec *specs.Spec

	node map[specs.LinuxNamespaceType]namespace // those of this process, which are the node's
	pod  *namespace                             // the network that the spec names
}

// namespace is the identity of a namespace.
type namespace struct{ dev, inode uint64 }

// files are the names of namespaces in /proc/PID/ns.
var files = map[specs.LinuxNamespaceType]string{
	specs.PIDNamespace: "pid", specs.NetworkNamespace: "net", specs.IPCNamespace: "ipc", specs.UTSNamespace: "uts",
	specs.MountNamespace: "mnt", specs.UserNamespace: "user", specs.CgroupNamespace: "cgroup",
}

// namespaceAt returns the namespace that a path leads to.
func namespaceAt(path string) (namespace, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return namespace{}, fmt.Errorf("namespace %s: %w", path, err)
	}
	return namespace{st.Dev, st.Ino}, nil
}

// own notes what the processes' namespaces are compared with.
func (l *looker) own() error {
	l.node = make(map[specs.LinuxNamespaceType]namespace)
	for typ, file := range files {
		ns, err := namespaceAt(filepath.Join(l.proc, "self/ns", file))
		if errors.Is(err, os.ErrNotExist) { // a kernel without it
			continue
		}
		if err != nil {
			return err
		}
		l.node[typ] = ns
	}
	for _, n := range l.spec.Linux.Namespaces {
		if n.Type == specs.NetworkNamespace && n.Path != "" {
			ns, err := namespaceAt(n.Path)
			if err != nil {
				return err
			}
			l.pod = &ns
		}
	}
	return nil
}

// process looks at a process. It is nil if it is none of the container's.
func (l *looker) process(pid int) (*image.Task, []string, error) {
	dir := filepath.Join(l.proc, strconv.Itoa(pid))
	ns, err := namespaceAt(filepath.Join(dir, "ns/pid"))
	if err != nil || ns == l.node[specs.PIDNamespace] {
		return nil, nil, err
	}
	t := &image.Task{State: image.Alive}
	threads, err := os.ReadDir(filepath.Join(dir, "task"))
	if err != nil {
		return nil, nil, err
	}
	for _, e := range threads {
		th, err := l.thread(filepath.Join(dir, "task", e.Name()))
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if e.Name() == filepath.Base(dir) { // the leader is the first
			t.PID, t.Comm = th.TID, th.Comm
		}
		t.Threads = append(t.Threads, *th)
	}
	if len(l.spec.Process.Rlimits) > 0 {
		for n := range limits {
			var limit unix.Rlimit
			if err := unix.Prlimit(pid, n, nil, &limit); err != nil {
				return nil, nil, err
			}
			t.Limits = append(t.Limits, image.Limit{Soft: limit.Cur, Hard: limit.Max})
		}
	}
	differences, err := l.namespaces(t, dir)
	return t, differences, err
}

// namespaces compares a process's namespaces: the pod's network, the node's users, and
// none of the node's where the spec has one.
func (l *looker) namespaces(t *image.Task, dir string) (differences []string, err error) {
	wanted := map[specs.LinuxNamespaceType]bool{}
	for _, n := range l.spec.Linux.Namespaces {
		wanted[n.Type] = true
	}
	for typ, node := range l.node {
		ns, err := namespaceAt(filepath.Join(dir, "ns", files[typ]))
		if err != nil {
			return nil, err
		}
		var has, want string
		switch {
		case typ == specs.NetworkNamespace && l.pod != nil:
			if ns != *l.pod {
				has, want = "another", "the pod's"
			}
		case wanted[typ]:
			if ns == node {
				has, want = "the node's", "one of its own"
			}
		case typ == specs.NetworkNamespace || typ == specs.UserNamespace:
			if ns != node {
				has, want = "one of its own", "the node's"
			}
		}
		if has != "" {
			differences = append(differences, fmt.Sprintf("task %d: %s namespace: the restored one has %s, the pod's spec has %s", t.PID, typ, has, want))
		}
	}
	return differences, nil
}
