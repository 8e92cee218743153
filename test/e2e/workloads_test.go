// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// workload is a program and what its state looks like from outside. observe is called before the checkpoint and after the
// restore; proves says whether the second observation continues the first.
type workload struct {
	env     map[string]string
	warm    func(ctx context.Context, pod *stack.Pod, c *stack.Container) error
	observe func(ctx context.Context, pod *stack.Pod, c *stack.Container) (string, error)
	proves  func(before, after string) error
}

// get asks a server in a pod.
func get(ctx context.Context, pod *stack.Pod, path string) (string, error) {
	b, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080"+path)
	return string(b), err
}

func equal(before, after string) error {
	if before != after {
		return fmt.Errorf("after the restore %q, before the checkpoint %q", after, before)
	}
	return nil
}

// number takes the integer at a key out of a JSON object.
func number(object, key string) (int, error) {
	var m map[string]any
	if err := json.Unmarshal([]byte(object), &m); err != nil {
		return 0, fmt.Errorf("%q: %w", object, err)
	}
	v, ok := m[key].(float64)
	if !ok {
		return 0, fmt.Errorf("%q has no number %s", object, key)
	}
	return int(v), nil
}

// counted says whether a counter went on by one and the rest of the reply, a checksum, is the same.
func counted(counter string) func(before, after string) error {
	return func(before, after string) error {
		b, err := number(before, counter)
		if err != nil {
			return err
		}
		a, err := number(after, counter)
		if err != nil {
			return err
		}
		if a != b+1 {
			return fmt.Errorf("%s is %d after the restore, it was %d: %d belongs there", counter, a, b, b+1)
		}
		sum := regexp.MustCompile(`"checksum": ?"[0-9a-f]+"`)
		if x, y := sum.FindString(before), sum.FindString(after); x == "" || x != y {
			return fmt.Errorf("checksum %s after the restore, it was %s", y, x)
		}
		return nil
	}
}

// askThenChecksum advances a counter by one and reads the checksum over the state.
func askThenChecksum(ask string) func(context.Context, *stack.Pod, *stack.Container) (string, error) {
	return func(ctx context.Context, pod *stack.Pod, _ *stack.Container) (string, error) {
		if _, err := get(ctx, pod, ask); err != nil {
			return "", err
		}
		return get(ctx, pod, "/checksum")
	}
}

// lastLine waits for a container to log and returns the number and the sum of a line "n=N sum=S".
func firstLine(ctx context.Context, c *stack.Container) (first, last string, err error) {
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for {
		text, err := c.Log()
		if lines := strings.Split(strings.TrimSpace(text), "\n"); err == nil && len(lines) > 1 {
			cut := func(s string) string { return s[strings.LastIndex(s, "n="):] }
			// The last line may still be written.
			return cut(lines[0]), cut(lines[len(lines)-2]), nil
		}
		select {
		case <-ctx.Done():
			return "", "", fmt.Errorf("no log: %w", ctx.Err())
		case <-pace.C:
		}
	}
}

// sums says whether the first line after the restore follows a line of before, and its sum is right: it was added up in memory.
func sums(before, after string) error {
	b := strings.Split(before, " ; ")
	a := strings.Split(after, " ; ")
	var last, next, sum int
	if _, err := fmt.Sscanf(b[1], "n=%d", &last); err != nil {
		return fmt.Errorf("%q: %w", before, err)
	}
	if _, err := fmt.Sscanf(a[0], "n=%d sum=%d", &next, &sum); err != nil {
		return fmt.Errorf("%q: %w", after, err)
	}
	// The dump came a moment after the log was read.
	if next <= last || next > last+600 {
		return fmt.Errorf("goes on with line %d after line %d", next, last)
	}
	if sum != next*(next+1)/2 {
		return fmt.Errorf("sum of the first %d numbers is %d", next, sum)
	}
	if m := regexp.MustCompile(`file=(\d+)`).FindStringSubmatch(a[0]); m != nil && m[1] != strconv.Itoa(next) {
		return fmt.Errorf("the deleted file has %s records, %d belong there", m[1], next)
	}
	return nil
}

func logLines(ctx context.Context, _ *stack.Pod, c *stack.Container) (string, error) {
	first, last, err := firstLine(ctx, c)
	return first + " ; " + last, err
}

// redisCLI runs a command of redis-cli in the container.
func redisCLI(ctx context.Context, c *stack.Container, args ...string) (string, error) {
	return c.Exec(ctx, append([]string{"/usr/bin/redis-cli"}, args...)...)
}

// nginxWorkers asks until both workers have answered, and returns their PIDs.
func nginxWorkers(ctx context.Context, pod *stack.Pod, _ *stack.Container) (string, error) {
	seen := make(map[string]bool)
	pid := regexp.MustCompile(`pid=(\d+)`)
	for len(seen) < 2 {
		b, err := get(ctx, pod, "/") // a new connection each time: the kernel spreads them
		if err != nil {
			return fmt.Sprint(seen), err
		}
		m := pid.FindStringSubmatch(b)
		if m == nil {
			return "", fmt.Errorf("reply %q", b)
		}
		seen[m[1]] = true
	}
	return fmt.Sprint(seen), nil // maps are printed in the order of their keys
}

var all = map[string]workload{
	workloads.Agent: {
		env:     map[string]string{"DOCUMENTS": "4000"},
		observe: askThenChecksum("/ask?q=karo+mi"), proves: counted("session"),
	},
	workloads.Node: {observe: askThenChecksum("/ask?key=77"), proves: counted("count")},
	workloads.Redis: {
		warm: func(ctx context.Context, _ *stack.Pod, c *stack.Container) error {
			for {
				if out, err := redisCLI(ctx, c, "PING"); err == nil && strings.TrimSpace(out) == "PONG" {
					break
				}
				if ctx.Err() != nil {
					return ctx.Err()
				}
			}
			_, err := redisCLI(ctx, c, "EVAL", "for i=1,100000 do redis.call('SET','key:'..i,'value '..i*i) end return 1", "0")
			return err
		},
		observe: func(ctx context.Context, _ *stack.Pod, c *stack.Container) (string, error) {
			size, err := redisCLI(ctx, c, "DBSIZE")
			if err != nil || strings.TrimSpace(size) != "100000" {
				return size, fmt.Errorf("DBSIZE is %q: %w", size, err)
			}
			return redisCLI(ctx, c, "EVAL", "local s='' for i=1,100000,97 do s=redis.sha1hex(s..redis.call('GET','key:'..i)) end return s", "0")
		},
		proves: equal,
	},
	workloads.Nginx: {observe: nginxWorkers, proves: equal},
	workloads.Threads: {
		observe: func(ctx context.Context, pod *stack.Pod, _ *stack.Container) (string, error) {
			return get(ctx, pod, "/state")
		},
		proves: func(before, after string) error {
			type state struct {
				Threads int
				Steps   []uint64
				OK      bool
			}
			var b, a state
			if err := json.Unmarshal([]byte(before), &b); err != nil {
				return err
			}
			if err := json.Unmarshal([]byte(after), &a); err != nil {
				return err
			}
			if !a.OK || a.Threads != 8 || len(a.Steps) != 8 {
				return fmt.Errorf("state %s", after)
			}
			for i := range a.Steps {
				if a.Steps[i] <= b.Steps[i] {
					return fmt.Errorf("thread %d is at step %d, it was at %d", i, a.Steps[i], b.Steps[i])
				}
			}
			return nil
		},
	},
	workloads.Pipeline: {observe: logLines, proves: sums},
	workloads.Sockets:  {observe: logLines, proves: sums},
}

// TestWorkloads restores each workload from the registry in a new pod, whose memory must be that of the old one.
func TestWorkloads(t *testing.T) {
	for name, w := range all {
		t.Run(name, func(t *testing.T) {
			ctx, s := start(t, name)
			old, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
			if err != nil {
				t.Fatal(err)
			}
			c, err := old.Run(ctx, stack.ContainerOptions{Image: s.Workload(name), Env: w.env})
			if err != nil {
				t.Fatal(err)
			}
			if w.warm != nil {
				if err := w.warm(ctx, old, c); err != nil {
					t.Fatal(err)
				}
			}
			before, err := w.observe(ctx, old, c)
			if err != nil {
				t.Fatal(err)
			}
			ref := freeze(ctx, t, s, c)
			if err := old.Remove(ctx); err != nil {
				t.Fatal(err)
			}
			if err := s.ClearThawCache(ctx); err != nil {
				t.Fatal(err)
			}
			pod, restored := restore(ctx, t, s, ref, stack.ContainerOptions{Env: w.env})
			if pod.IP == old.IP || restored.ID == c.ID {
				t.Errorf("the restored pod has the old address %s or ID %s", pod.IP, restored.ID)
			}
			after, err := w.observe(ctx, pod, restored)
			if err != nil {
				t.Fatal(err)
			}
			if err := w.proves(before, after); err != nil {
				t.Error(err)
			}
			if out, err := restored.Exec(ctx, "/bin/hostname"); name != workloads.Threads && (err != nil || strings.TrimSpace(out) != pod.Config.Hostname) {
				t.Errorf("host name is %q, the pod's is %q: %v", out, pod.Config.Hostname, err)
			}
		})
	}
}

// TestSharedFetch restores one image twice at the same time: the second one costs the registry nothing.
func TestSharedFetch(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	env := map[string]string{"MEMORY_MIB": "128"}
	old, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := old.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Synthetic), Env: env})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := get(ctx, old, "/touch"); err != nil {
		t.Fatal(err)
	}
	ref := freeze(ctx, t, s, c)
	if err := old.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	before := s.Registry.Traffic(nil)
	pods := make([]*stack.Pod, 2)
	for i := range pods {
		pods[i], _ = restore(ctx, t, s, ref, stack.ContainerOptions{Env: env})
	}
	errs := make(chan error, len(pods))
	for _, pod := range pods {
		go func() {
			b, err := get(ctx, pod, "/verify")
			if err == nil && !strings.Contains(b, `"ok":true`) {
				err = fmt.Errorf("%s: %s", http.StatusText(http.StatusOK), b)
			}
			errs <- err
		}()
	}
	for range pods {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	fetched := s.Registry.Traffic(nil).Sent - before.Sent
	if limit := int64(128<<20) * 110 / 100; fetched > limit || fetched < 128<<20 {
		t.Errorf("two restores of 128 MiB fetched %d bytes: each chunk must be fetched once", fetched)
	}
}
