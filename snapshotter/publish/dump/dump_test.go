// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"thaw.dev/thaw/criu/criulog"
)

func container(t *testing.T, change func(*containers.Container, *specs.Spec)) *Container {
	t.Helper()
	info := containers.Container{ID: strings.Repeat("c", 64), Labels: map[string]string{}, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"}}
	spec := specs.Spec{
		Annotations: map[string]string{},
		Process:     &specs.Process{},
		Linux:       &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}}},
	}
	change(&info, &spec)
	p, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	info.Spec = typeurl.Any(&anypb.Any{Value: p})
	return &Container{Namespace: "k8s.io", info: info}
}

func TestCheck(t *testing.T) {
	for want, change := range map[string]func(*containers.Container, *specs.Spec){
		"":                        func(*containers.Container, *specs.Spec) {},
		"is the sandbox of a pod": func(c *containers.Container, _ *specs.Spec) { c.Labels[labelKind] = "sandbox" },
		"runs under io.containerd.runsc.v1": func(c *containers.Container, _ *specs.Spec) {
			c.Runtime.Name = "io.containerd.runsc.v1"
		},
		"no Linux container": func(_ *containers.Container, s *specs.Spec) { s.Linux = nil },
		"no PID namespace of its own": func(_ *containers.Container, s *specs.Spec) {
			s.Linux.Namespaces[0].Path = "/proc/1/ns/pid"
		},
	} {
		err := container(t, change).check()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v", want, err)
		}
	}
	if err := container(t, func(_ *containers.Container, s *specs.Spec) { s.Linux.Namespaces = nil }).check(); err == nil {
		t.Error("the host's PID namespace was accepted")
	}
}

func TestName(t *testing.T) {
	for want, change := range map[string]func(*containers.Container, *specs.Spec){
		"agent":                 func(_ *containers.Container, s *specs.Spec) { s.Annotations[annotationName] = "agent" },
		"db":                    func(c *containers.Container, _ *specs.Spec) { c.Labels[labelNerdctlName] = "db" },
		strings.Repeat("c", 64): func(*containers.Container, *specs.Spec) {},
	} {
		c := container(t, change)
		if err := c.check(); err != nil {
			t.Fatal(err)
		}
		if got := c.Name(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMemoryDir(t *testing.T) {
	if _, err := memoryDir(t.TempDir(), 0); err == nil {
		t.Log("temporary files are in memory here")
	} else if !strings.Contains(err.Error(), "--dump-dir") {
		t.Errorf("no remedy: %v", err)
	}
	if _, err := memoryDir("/nowhere/at/all", 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing folder: %v", err)
	}
	if holdsMemory("/dev/shm", 0) != nil {
		t.Skip("/dev/shm is no tmpfs with room")
	}
	if _, err := memoryDir("/dev/shm", 1<<60); err == nil || !strings.Contains(err.Error(), "MiB left") {
		t.Errorf("no room: %v", err)
	}
	dir, err := memoryDir("/dev/shm", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.remove(); err != nil {
		t.Error(err)
	}
}

func TestSweep(t *testing.T) {
	in := t.TempDir()
	long := time.Now().Add(-time.Hour)
	var made []*folder
	for range 3 {
		f, err := newFolder(in)
		if err != nil {
			t.Fatal(err)
		}
		defer f.remove()
		made = append(made, f)
	}
	used, dead, young := made[0], made[1], made[2]
	for _, f := range []*folder{used, dead} {
		if err := os.Chtimes(f.path, long, long); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []*folder{dead, young} {
		if err := f.lock.Close(); err != nil {
			t.Fatal(err)
		}
	}
	other := filepath.Join(in, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	sweep(in)
	for path, want := range map[string]bool{used.path: true, dead.path: false, young.path: true, other: true} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestDumpable(t *testing.T) {
	before := dumpable(uint32(os.Getpid()))
	if before == 0 {
		t.Skip("no smaps_rollup")
	}
	p := make([]byte, 32<<20)
	for i := range p {
		p[i] = 1
	}
	if after := dumpable(uint32(os.Getpid())); after < before+16<<20 {
		t.Errorf("%d bytes, %d after taking %d more", before, after, len(p))
	}
	if dumpable(1<<31) != 0 {
		t.Error("memory of a process that is not there")
	}
}

func TestExplain(t *testing.T) {
	work, logs := t.TempDir(), t.TempDir()
	cause := errors.New("runc did not complete")
	if err := explain("abc", work, logs, cause); !errors.Is(err, cause) {
		t.Errorf("without log: %v", err)
	}
	log := `(00.000000) Version: 4.2.1 (gitid 0)
(00.001186) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.015859) Error (criu/sk-inet.c:130): inet: Unsupported proto 262 for socket 1788e
(00.081419) Error (criu/cr-dump.c:2111): Dumping FAILED.
`
	if err := os.WriteFile(filepath.Join(work, criulog.Dump), []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	err := explain("abc", work, logs, cause)
	for _, want := range []string{"abc", "Unsupported proto 262", "multipathtcp=0", filepath.Join(logs, "abc", criulog.Dump)} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
	if kept, err := os.ReadFile(filepath.Join(logs, "abc", criulog.Dump)); err != nil || string(kept) != log {
		t.Errorf("kept %q, %v", kept, err)
	}
	if v := versionIn(strings.NewReader(log)); v != "4.2.1" {
		t.Errorf("version %q", v)
	}
}

// restarting is a task of a containerd that answers after a few calls.
type restarting struct {
	containerd.Task
	away    int
	resumed bool
}

func (r *restarting) Resume(context.Context) error {
	if r.away--; r.away >= 0 {
		return errdefs.ErrUnavailable
	}
	r.resumed = true
	return nil
}

func (r *restarting) Status(context.Context) (containerd.Status, error) {
	if r.away > 0 {
		return containerd.Status{}, errdefs.ErrUnavailable
	}
	return containerd.Status{Status: containerd.Paused}, nil
}

// TestResumeAfterRestart: a container does not stay frozen because containerd was restarted while it was dumped.
func TestResumeAfterRestart(t *testing.T) {
	c := container(t, func(*containers.Container, *specs.Spec) {})
	task := &restarting{Task: nil, away: 3}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // as after an interrupt
	d := &Dump{info: c.info, task: task, paused: true}
	if err := d.resume(ctx); err != nil || !task.resumed || d.paused {
		t.Errorf("resumed %v, paused %v: %v", task.resumed, d.paused, err)
	}
}
