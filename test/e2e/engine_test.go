// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

var restores = flag.Int("restores", 25, "restores of TestRepeatedRestores")

// delayed makes the registry answer after random times, so that chunks come in random order.
func delayed(t *testing.T, s *stack.Stack, most time.Duration) {
	t.Helper()
	s.Registry.Intercept(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(rand.N(most)):
			case <-r.Context().Done():
			}
			next.ServeHTTP(w, r)
		})
	})
	t.Cleanup(func() { s.Registry.Intercept(nil) })
}

// logged waits until a container has written a line.
func logged(ctx context.Context, t *testing.T, c *stack.Container, line string) {
	t.Helper()
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for {
		text, err := c.Log()
		if err == nil && strings.Contains(text, " F "+line) {
			return
		}
		if strings.Contains(text, "torture: ") {
			t.Fatal(text)
		}
		select {
		case <-ctx.Done():
			t.Fatalf("no %q: %q, %v", line, text, err)
		case <-pace.C:
		}
	}
}

// goesOn checkpoints a program of test/torture that waits for SIGUSR1, restores it, lets it go on, and waits for its end. The
// program checks every byte that it reads.
func goesOn(ctx context.Context, t *testing.T, s *stack.Stack, workload, policy string, looks func(*stack.Pod), args ...string) {
	t.Helper()
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workload), Args: args})
	if err != nil {
		t.Fatal(err)
	}
	logged(ctx, t, c, "ready")
	ref := freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureImage(ctx, ref, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	delayed(t, s, 3*time.Millisecond)
	pod, c = restore(ctx, t, s, ref, stack.ContainerOptions{Args: args, Annotations: map[string]string{"thaw.dev/policy": policy}})
	task, err := c.Task(ctx)
	if err != nil {
		t.Fatal(err)
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Kill(ctx, unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if looks != nil {
		looks(pod)
	}
	e := <-exit
	if text, _ := c.Log(); e.ExitCode() != 0 || e.Error() != nil || !strings.Contains(text, " F OK ") {
		t.Errorf("exit code %d, %v: %s", e.ExitCode(), e.Error(), text)
	}
	if status := reported(ctx, t, s, c.ID); status != nil && status.State == "failed" {
		t.Errorf("%+v", status)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Error(err)
	}
}

// TestCrowds: a container of 200 processes, one of 300 threads that fault at once, and forks as many as can be right after
// the restore, of which some exec, exit or are killed with faults outstanding; all while signals interrupt the faults.
func TestCrowds(t *testing.T) {
	for _, c := range []struct{ kind, n, policy string }{{"processes", "200", "lazy"}, {"threads", "300", "cached"}, {"storm", "150", "complete"}} {
		t.Run(c.kind, func(t *testing.T) {
			ctx, s := start(t, workloads.Crowd)
			goesOn(ctx, t, s, workloads.Crowd, c.policy, func(pod *stack.Pod) {
				pid, err := pod.ShimPID()
				if err != nil {
					t.Fatal(err)
				}
				u, err := use(pid)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("the shim with %s %s: %+v", c.n, c.kind, u)
				// Its own, and one for each process.
				if u.Descriptors > 350 || u.Threads > 64 || u.Memory > 96<<20 {
					t.Errorf("%+v", u)
				}
			}, c.kind, c.n)
		})
	}
}

// TestTortured: a program that does random things to its memory goes on with them after a restore.
func TestTortured(t *testing.T) {
	for i := range 3 {
		seed := rand.Uint32()
		for !rests(uint64(seed)) {
			seed++
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			ctx, s := start(t, workloads.Torture)
			goesOn(ctx, t, s, workloads.Torture, []string{"lazy", "cached", "complete"}[i], nil, fmt.Sprint(seed), "200", "400")
		})
	}
}

// rests tells whether the torture program with a seed stops for the checkpoint. (The test beside it has the others, too: CRIU cannot
// dump a process with threads in the moment in which it exits.)
func rests(seed uint64) bool {
	seed += 0x9e3779b97f4a7c15
	seed = (seed ^ seed>>30) * 0xbf58476d1ce4e5b9
	seed = (seed ^ seed>>27) * 0x94d049bb133111eb
	return (seed^seed>>31)>>8&1 == 0 // as in test/torture/program
}

// usage is what a process uses.
type usage struct {
	Descriptors, Threads int
	Memory               int64         // bytes in RAM
	CPU                  time.Duration // user and system
}

// use says what a process uses.
func use(pid int) (usage, error) {
	var u usage
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	tasks, terr := os.ReadDir(filepath.Join(proc, "task"))
	text, serr := os.ReadFile(filepath.Join(proc, "stat"))
	if err := errors.Join(err, terr, serr); err != nil {
		return u, err
	}
	u.Descriptors, u.Threads = len(fds), len(tasks)
	if u.Memory, err = resident(pid); err != nil {
		return u, err
	}
	// The second field is a name in parentheses, of any characters (proc(5)).
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return u, fmt.Errorf("%s/stat: %q", proc, text)
	}
	for _, f := range fields[11:13] {
		ticks, err := strconv.Atoi(f)
		if err != nil {
			return u, err
		}
		u.CPU += time.Duration(ticks) * time.Second / 100 // USER_HZ
	}
	return u, nil
}

// TestIdle: while no page is missed, the page handler uses no CPU: a shim with one takes what runc's shim takes, of which
// containerd asks for statistics now and then, and the daemon nothing.
func TestIdle(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	plain, err := s.RunPod(ctx, stack.PodOptions{Name: "plain", Handler: "runc"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := plain.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Synthetic), Env: synthetic}); err != nil {
		t.Fatal(err)
	}
	pod, c := lazily(ctx, t, s, ref)
	if _, err := get(ctx, pod, "/touch"); err != nil {
		t.Fatal(err)
	}
	pids := make([]int, 3)
	for i, p := range []*stack.Pod{plain, pod} {
		if pids[i], err = p.ShimPID(); err != nil {
			t.Fatal(err)
		}
	}
	pids[2] = s.Daemon().PID()
	spent := func() (d [3]time.Duration) {
		for i, pid := range pids {
			u, err := use(pid)
			if err != nil {
				t.Fatal(err)
			}
			d[i] = u.CPU
		}
		return d
	}
	// Some intervals: what the restore itself leaves to be done is done in the first.
	const long, most = 3 * time.Second, 60 * time.Millisecond
	for tries := 4; ; tries-- {
		before := spent()
		<-time.After(long)
		after := spent()
		runc, thaw, daemon := after[0]-before[0], after[1]-before[1], after[2]-before[2]
		t.Logf("CPU in %v: runc's shim %v, thaw's shim %v, daemon %v", long, runc, thaw, daemon)
		if thaw <= runc+most && daemon <= most {
			break
		}
		if tries == 1 {
			t.Error("CPU is used while nothing faults")
			break
		}
	}
	if status := reported(ctx, t, s, c.ID); status == nil || status.PagesPresent == status.PagesTotal {
		t.Errorf("no page is missing: %+v", status)
	}
}

// TestRepeatedRestores restores a container many times in one pod: shim and daemon are then as they were.
func TestRepeatedRestores(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	if extra := time.Duration(*restores) * time.Second; extra > time.Minute {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), extra)
		defer cancel()
	}
	ref := frozenSynthetic(ctx, t, s)
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "again", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	shim, err := pod.ShimPID()
	if err != nil {
		t.Fatal(err)
	}
	policies := []string{"lazy", "cached", "complete"}
	take := func() map[string]usage {
		out := map[string]usage{}
		for name, pid := range map[string]int{"shim": shim, "daemon": s.Daemon().PID(), "containerd": s.ContainerdProcess().PID()} {
			u, err := use(pid)
			if err != nil {
				t.Fatal(err)
			}
			out[name] = u
		}
		return out
	}
	var node stack.State
	var before map[string]usage
	warm := min(*restores/2, 20) // until then pools and caches grow
	for i := range *restores {
		if i == warm {
			if node, err = s.State(ctx); err != nil {
				t.Fatal(err)
			}
			before = take()
		}
		c, err := pod.Run(ctx, stack.ContainerOptions{
			Image: ref, Env: synthetic, Attempt: uint32(i),
			Annotations: map[string]string{"thaw.dev/policy": policies[i%len(policies)]},
		})
		if err != nil {
			t.Fatalf("restore %d: %v", i, err)
		}
		path := "/touch"
		if i%5 == 0 {
			path = "/verify"
		}
		if _, err := get(ctx, pod, path); err != nil {
			t.Fatalf("restore %d: %v", i, err)
		}
		if err := c.Stop(ctx, 0); err != nil {
			t.Fatalf("restore %d: %v", i, err)
		}
		if err := c.Remove(ctx); err != nil {
			t.Fatalf("restore %d: %v", i, err)
		}
	}
	if err := s.AwaitClean(ctx, node); err != nil {
		t.Error(err)
	}
	after := take()
	for name, a := range after {
		b := before[name]
		t.Logf("%s after %d restores: %+v, after %d: %+v", name, warm, b, *restores, a)
		if name == "containerd" {
			continue // not this project's
		}
		if a.Descriptors > b.Descriptors+8 || a.Threads > b.Threads+8 || a.Memory > b.Memory+16<<20 {
			t.Errorf("%s leaks", name)
		}
	}
}
