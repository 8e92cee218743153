// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

var kills = flag.Int("kills", 2, "rounds of each part of TestKills")

// tortureSeed is one of a program that does not pause while it waits to be told to end, and that has children.
const tortureSeed = "56"

// checked is a checkpoint of test/torture's program, which checks all that it reads and says what is wrong in a file:
// that outlives whoever passes on what containers print.
type checked struct {
	ref    string
	report string // the file
	mounts []*cri.Mount
}

const dumped = "ready\n" // what the file has at the dump, and so must have at a restore

func newChecked(ctx context.Context, t *testing.T, s *stack.Stack) *checked {
	t.Helper()
	root, err := stack.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(s.Dir, "kills-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	k := &checked{report: filepath.Join(dir, "report"), mounts: []*cri.Mount{
		{HostPath: filepath.Join(root, "build", "workloads"), ContainerPath: "/programs", Readonly: true},
		{HostPath: dir, ContainerPath: "/report"},
	}}
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{
		Image: s.Workload(workloads.Debian), Mounts: k.mounts,
		Command: []string{"/bin/sh", "-c", "exec /programs/torture " + tortureSeed + " 200 200 >>/report/report 2>&1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if said, err := k.await(ctx, func(said string) bool { return said != "" }); said != dumped || err != nil {
		t.Fatalf("%q, %v", said, err)
	}
	k.ref = s.Registry.Ref("checkpoints/kills:" + c.ID[:8])
	for tries := 8; ; tries-- { // CRIU does not dump a process that exits in that instant
		_, err := thaw(ctx, s, "checkpoint", c.ID, "--push", k.ref)
		if err == nil {
			break
		}
		if tries == 1 || !strings.Contains(err.Error(), "Zombies with threads") {
			t.Fatal(err)
		}
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureImage(ctx, k.ref, nil); err != nil {
		t.Fatal(err)
	}
	return k
}

// await waits until the program has said something, and returns it.
func (k *checked) await(ctx context.Context, enough func(string) bool) (string, error) {
	pace := time.NewTicker(5 * time.Millisecond)
	defer pace.Stop()
	for {
		said, err := os.ReadFile(k.report)
		if err != nil && !errors.Is(err, os.ErrNotExist) || enough(string(said)) {
			return string(said), err
		}
		select {
		case <-ctx.Done():
			return string(said), ctx.Err()
		case <-pace.C:
		}
	}
}

// gone waits until none of the program's processes is left.
func (k *checked) gone(ctx context.Context) error {
	pace := time.NewTicker(5 * time.Millisecond)
	defer pace.Stop()
	for {
		left := 0
		lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, line := range lines {
			if text, _ := os.ReadFile(line); strings.HasPrefix(string(text), "/programs/torture\x00") {
				left++
			}
		}
		if left == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d processes are left: %w", left, ctx.Err())
		case <-pace.C:
		}
	}
}

// blow is what is killed, and when: while the container is restored or runs, or only once it runs.
type blow struct {
	name    string
	running bool // not before the container runs
	fatal   bool // for the container
	strike  func(ctx context.Context, s *stack.Stack, pod *stack.Pod, shim int) error
	// mended makes good what strike did, once its effect was seen.
	mended func(ctx context.Context, s *stack.Stack) error
}

func killShim(_ context.Context, _ *stack.Stack, _ *stack.Pod, shim int) error {
	return unix.Kill(shim, unix.SIGKILL)
}

func killDaemon(_ context.Context, s *stack.Stack, _ *stack.Pod, _ int) error {
	return unix.Kill(s.Daemon().PID(), unix.SIGKILL)
}

func startDaemon(ctx context.Context, s *stack.Stack) error {
	<-s.Daemon().Done()
	return s.StartDaemon(ctx)
}

var blows = []blow{
	{name: "daemon", strike: func(ctx context.Context, s *stack.Stack, pod *stack.Pod, shim int) error {
		return errors.Join(killDaemon(ctx, s, pod, shim), startDaemon(ctx, s))
	}},
	{name: "shim", fatal: true, strike: killShim},
	{name: "both", fatal: true, strike: func(ctx context.Context, s *stack.Stack, pod *stack.Pod, shim int) error {
		return errors.Join(killDaemon(ctx, s, pod, shim), killShim(ctx, s, pod, shim))
	}, mended: startDaemon},
	{name: "guard", running: true, strike: func(context.Context, *stack.Stack, *stack.Pod, int) error {
		comms, err := filepath.Glob("/proc/[0-9]*/comm")
		for _, comm := range comms {
			if name, _ := os.ReadFile(comm); string(name) == "thaw-guard\n" {
				var pid int
				_, serr := fmt.Sscanf(comm, "/proc/%d/", &pid)
				err = errors.Join(err, serr, unix.Kill(pid, unix.SIGKILL))
			}
		}
		return err
	}},
	{name: "containerd", running: true, strike: func(ctx context.Context, s *stack.Stack, _ *stack.Pod, _ int) error {
		return errors.Join(s.ContainerdProcess().Kill(), s.StartContainerd(ctx))
	}},
}

// TestKills kills the parts of thaw, and containerd, at random moments of a restore and of the time after it. The container is
// dead, waits or goes on, and sees no wrong byte; nothing of it is left, and the next one is restored.
func TestKills(t *testing.T) {
	ctx, s := start(t, workloads.Debian)
	if extra := time.Duration(*kills*len(blows)) * 10 * time.Second; extra > 2*time.Minute {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), extra)
		defer cancel()
	}
	k := newChecked(ctx, t, s)
	delayed(t, s, 3*time.Millisecond)
	for i := range *kills {
		for _, b := range blows {
			t.Run(fmt.Sprintf("%s/%d", b.name, i), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				defer cancel()
				k.round(ctx, t, s, b, []string{"lazy", "cached", "complete"}[i%3])
			})
			if t.Failed() {
				return
			}
		}
	}
}

// round is one restore that something is done to.
func (k *checked) round(ctx context.Context, t *testing.T, s *stack.Stack, b blow, policy string) {
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	before, err := s.State(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(k.report, []byte(dumped), 0o644); err != nil {
		t.Fatal(err)
	}
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "restored", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	shim, err := pod.ShimPID()
	if err != nil {
		t.Fatal(err)
	}
	running, struck := make(chan struct{}), make(chan error, 1)
	moment := rand.N([]time.Duration{100 * time.Millisecond, time.Second}[rand.IntN(2)]) // the restore takes about the former
	go func() {
		if b.running {
			<-running
		}
		<-time.After(moment)
		struck <- b.strike(ctx, s, pod, shim)
	}()
	begun := time.Now()
	c, failed := pod.Run(ctx, stack.ContainerOptions{
		Image: k.ref, Mounts: k.mounts, Annotations: map[string]string{"thaw.dev/policy": policy},
		Command: []string{"/programs/torture"},
	})
	took := time.Since(begun)
	close(running)
	if err := <-struck; err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %s killed after %v, start took %v: %v", policy, b.name, moment, took, failed)
	switch {
	case b.fatal:
		waited := time.Now()
		if err := k.gone(ctx); err != nil {
			t.Error(err)
		}
		t.Logf("all dead after %v", time.Since(waited))
	case failed != nil:
		if b.running || !strings.Contains(failed.Error(), "thaw-snapshotter") {
			t.Error(failed)
		}
	default:
		k.goesOn(ctx, t, s, c)
	}
	if said, err := os.ReadFile(k.report); err != nil || strings.Contains(string(said), "torture: ") {
		t.Errorf("wrong memory: %s, %v", said, err)
	}
	if b.mended != nil {
		if err := b.mended(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	removeDeadSockets(t)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := s.AwaitClean(ctx, before); err != nil {
		t.Errorf("%.2000s", err)
	}
}

// goesOn asks for a container in each way there is, and lets it come to its end.
func (k *checked) goesOn(ctx context.Context, t *testing.T, s *stack.Stack, c *stack.Container) {
	t.Helper()
	task, err := c.Task(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if pids, err := task.Pids(ctx); err != nil || len(pids) == 0 {
		t.Errorf("%d processes, %v", len(pids), err)
	}
	if out, err := c.Exec(ctx, "/bin/echo", "still", "here"); err != nil || out != "still here\n" {
		t.Errorf("exec: %q, %v", out, err)
	}
	runtime, _ := s.CRI()
	stats, err := runtime.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: c.ID})
	if err != nil || stats.GetStats().GetMemory().GetWorkingSetBytes().GetValue() == 0 {
		t.Errorf("stats: %v, %v", stats, err)
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Kill(ctx, unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if e := <-exit; e.ExitCode() != 0 || e.Error() != nil {
		t.Errorf("exit code %d, %v", e.ExitCode(), e.Error())
	}
	if said, err := k.await(ctx, func(said string) bool { return said != dumped }); err != nil || said != dumped+"OK "+tortureSeed+"\n" {
		t.Errorf("the program said %q, %v", said, err)
	}
}
