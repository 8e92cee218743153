// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	core "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
)

// maxTasks bounds processes and threads: the kernel's highest PID limit is 4 Mi,
// no container has more than a small part of that.
const maxTasks = 1 << 16

// State is whether a process ran when it was dumped.
type State uint32

// States (CRIU, compel/include/uapi/task-state.h).
const (
	Alive   State = 1
	Dead    State = 2 // a zombie: no memory, no files, no privileges
	Stopped State = 3
	Zombie  State = 6 // as Dead
)

// Gone reports whether only the exit status of the process is left.
func (s State) Gone() bool { return s == Dead || s == Zombie }

// Task is one process.
type Task struct {
	PID, PPID, PGID, SID uint32 // in the container's PID namespace; PPID is 0 for the root
	State                State
	ExitCode             uint32
	Comm                 string
	// LoginUID is who logged in, for the audit log (/proc/PID/loginuid); NoLogin if
	// nobody did or the image does not say.
	LoginUID     uint32
	Architecture string // as CRIU names it: X86_64, AARCH64, ...
	// Threads are all threads, the process's leader first. A process that is
	// gone has none.
	Threads []Thread
	// IDs say which kernel objects the task shares with which.
	IDs IDs
	// Limits are the resource limits in the order of the kernel's RLIMIT_
	// numbers; nil if the image leaves them out.
	Limits []Limit
	Memory *Memory // nil if the process is gone
	FS     *FS     // nil if the process is gone
}

// NoLogin is the LoginUID of a process that no login made.
const NoLogin = 1<<32 - 1

// Thread is one thread of a process.
type Thread struct {
	TID     uint32
	Comm    string
	Creds   Creds
	Seccomp SeccompMode
	// Filter is the index of the thread's innermost filter in Filters. It is
	// meaningful in SeccompFilter mode.
	Filter uint32
	// Nice is the nice value, Policy the scheduling policy as in sched(7).
	Nice   int32
	Policy uint32
}

// SeccompMode is a thread's seccomp mode, as in linux/seccomp.h.
type SeccompMode uint32

// Seccomp modes.
const (
	SeccompDisabled SeccompMode = 0
	SeccompStrict   SeccompMode = 1
	SeccompFilter   SeccompMode = 2
)

func (m SeccompMode) String() string {
	switch m {
	case SeccompDisabled:
		return "none"
	case SeccompStrict:
		return "strict"
	case SeccompFilter:
		return "filter"
	}
	return fmt.Sprintf("mode %d", uint32(m))
}

// Limit is one resource limit.
type Limit struct {
	Soft, Hard uint64 // ^0 is unlimited
}

// IDs are CRIU's numbers for kernel objects; two tasks with the same number
// share the object. Zero means that the image does not say.
type IDs struct {
	Memory, Files, FS uint32
	PidNS, NetNS      uint32
	IpcNS, UtsNS      uint32
	MountNS, UserNS   uint32
	CgroupNS, TimeNS  uint32
}

// Tasks returns all processes in the order of the images: parents come before
// their children, the container's first process is the first.
func (d *Dir) Tasks() ([]Task, error) {
	var tasks []Task
	var entries []*pstree.PstreeEntry
	seen := make(map[uint32]bool)
	unique := func(id uint32) error {
		if id == 0 || id > 1<<22 || seen[id] || len(seen) == maxTasks {
			return fmt.Errorf("%w: pstree.img has task %d twice, or out of range, or more than %d tasks", ErrFormat, id, maxTasks)
		}
		seen[id] = true
		return nil
	}
	err := all(d, "pstree.img", magicPstree, func() *pstree.PstreeEntry { return &pstree.PstreeEntry{} }, func(e *pstree.PstreeEntry) error {
		if err := unique(e.GetPid()); err != nil {
			return err
		}
		if len(entries) > 0 && !seen[e.GetPpid()] || e.GetPpid() == e.GetPid() {
			return fmt.Errorf("%w: pstree.img has task %d without its parent %d", ErrFormat, e.GetPid(), e.GetPpid())
		}
		entries = append(entries, e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(entries) == 0 {
		return nil, fmt.Errorf("%w: pstree.img is missing or has no tasks", ErrFormat)
	}
	areas := maxAreas
	for _, e := range entries {
		t, err := d.task(e, unique, &areas)
		if err != nil {
			return nil, err
		}
		tasks = append(tasks, t)
	}
	return tasks, nil
}

// task reads what belongs to an entry. unique checks the number of a thread. CRIU
// writes an arbitrary one for a zombie, and does not read it. areas is how many
// mappings there may still be.
func (d *Dir) task(e *pstree.PstreeEntry, unique func(tid uint32) error, areas *int) (Task, error) {
	t := Task{PID: e.GetPid(), PPID: e.GetPpid(), PGID: e.GetPgid(), SID: e.GetSid(), LoginUID: NoLogin}
	c, err := d.core(t.PID)
	if err != nil {
		return t, err
	}
	tc := c.GetTc()
	if tc == nil {
		return t, fmt.Errorf("%w: core-%d.img describes no process", ErrFormat, t.PID)
	}
	t.State, t.ExitCode, t.Comm, t.Architecture = State(tc.GetTaskState()), tc.GetExitCode(), tc.GetComm(), c.GetMtype().String()
	if tc.Loginuid != nil {
		t.LoginUID = tc.GetLoginuid()
	}
	for _, l := range tc.GetRlimits().GetRlimits() {
		t.Limits = append(t.Limits, Limit{Soft: l.GetCur(), Hard: l.GetMax()})
	}
	switch t.State {
	case Dead, Zombie:
		return t, nil
	case Alive, Stopped:
	default:
		return t, fmt.Errorf("%w: core-%d.img has unknown task state %d", ErrFormat, t.PID, t.State)
	}
	// CRIU lets these, of images before 3.9, override what the threads say.
	if tc.OldSeccompMode != nil || tc.OldSeccompFilter != nil {
		return t, fmt.Errorf("%w: core-%d.img has a seccomp mode for the whole process: dump with CRIU 4.1 or later", ErrFormat, t.PID)
	}
	if t.IDs, err = d.ids(t.PID, c.GetIds()); err != nil {
		return t, err
	}
	leader, err := thread(t.PID, c)
	if err != nil {
		return t, err
	}
	if leader.Comm == "" {
		leader.Comm = t.Comm
	}
	t.Threads = append(t.Threads, leader)
	for _, tid := range e.GetThreads() {
		if tid == t.PID {
			continue
		}
		if err := unique(tid); err != nil {
			return t, err
		}
		c, err := d.core(tid)
		if err != nil {
			return t, err
		}
		th, err := thread(tid, c)
		if err != nil {
			return t, err
		}
		t.Threads = append(t.Threads, th)
	}
	if t.Memory, err = d.memory(t.PID, areas); err != nil {
		return t, err
	}
	t.FS, err = d.fs(t.PID)
	return t, err
}

func (d *Dir) core(tid uint32) (*core.CoreEntry, error) {
	c := &core.CoreEntry{}
	name := fmt.Sprintf("core-%d.img", tid)
	found, err := d.one(name, magicCore, c)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, fmt.Errorf("%w: %s is missing, pstree.img names the task", ErrFormat, name)
	}
	return c, nil
}

func thread(tid uint32, c *core.CoreEntry) (Thread, error) {
	tc := c.GetThreadCore()
	if tc == nil || tc.Creds == nil {
		return Thread{}, fmt.Errorf("%w: core-%d.img holds no credentials: dump with CRIU 4.1 or later", ErrFormat, tid)
	}
	th := Thread{TID: tid, Comm: tc.GetComm(), Seccomp: SeccompMode(tc.GetSeccompMode()), Filter: tc.GetSeccompFilter(), Nice: tc.GetSchedNice(), Policy: tc.GetSchedPolicy()}
	if unknown, err := varints(tc, 11); err != nil || len(unknown) > 0 {
		return th, fmt.Errorf("%w: core-%d.img has an unknown seccomp mode", ErrFormat, tid)
	}
	var err error
	if th.Creds, err = creds(tc.Creds); err != nil {
		return th, fmt.Errorf("%w: core-%d.img: %w", ErrFormat, tid, err)
	}
	return th, nil
}

// ids reads which kernel objects a task shares. They are in a file of their
// own, or in the task's core image (CRIU, criu/cr-dump.c).
func (d *Dir) ids(pid uint32, inCore *core.TaskKobjIdsEntry) (IDs, error) {
	e := &core.TaskKobjIdsEntry{}
	found, err := d.one(fmt.Sprintf("ids-%d.img", pid), magicIDs, e)
	if err != nil {
		return IDs{}, err
	}
	if !found {
		if e = inCore; e == nil {
			return IDs{}, fmt.Errorf("%w: ids-%d.img is missing", ErrFormat, pid)
		}
	}
	return idsOf(e), nil
}

func idsOf(e *core.TaskKobjIdsEntry) IDs {
	ids := IDs{
		Memory: e.GetVmId(), Files: e.GetFilesId(), FS: e.GetFsId(),
		PidNS: e.GetPidNsId(), NetNS: e.GetNetNsId(), IpcNS: e.GetIpcNsId(), UtsNS: e.GetUtsNsId(),
		MountNS: e.GetMntNsId(), UserNS: e.GetUserNsId(), CgroupNS: e.GetCgroupNsId(), TimeNS: e.GetTimeNsId(),
	}
	return ids
}
