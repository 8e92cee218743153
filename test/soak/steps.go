// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
)

// patience bounds a step: longer than any fault lasts.
const patience = 100 * time.Second

// step does one thing, in most cases while something fails, and looks at the node afterwards.
func (k *soak) step(ctx context.Context) error {
	k.steps++
	ctx, cancel := context.WithTimeout(ctx, 3*patience)
	defer cancel()
	f, name := k.fault()
	over := make(chan error, 1)
	go func() { over <- f(ctx) }()
	what, err := k.action(ctx, name)
	err = errors.Join(err, <-over)
	if err != nil {
		return fmt.Errorf("%s during %q: %w", what, name, err)
	}
	k.count("step: " + what)
	if name != "" {
		k.count("fault: " + name)
	}
	if name == containerdKilled {
		if err := k.expire(ctx); err != nil {
			return err
		}
	}
	if err := k.alive(ctx); err != nil {
		return fmt.Errorf("after %s during %q: %w", what, name, err)
	}
	if err := k.clean(ctx); err != nil {
		return fmt.Errorf("after %s during %q: %w", what, name, err)
	}
	if k.random.IntN(20) == 0 {
		return k.drain(ctx)
	}
	if k.random.IntN(6) == 0 && len(k.members) > 0 {
		return k.lethal(ctx, k.members[k.random.IntN(len(k.members))])
	}
	return nil
}

// action does something with a container.
func (k *soak) action(ctx context.Context, fault string) (string, error) {
	faulty := fault != ""
	if len(k.members) == 0 || len(k.members) < maxMembers && k.random.IntN(2) == 0 {
		c := k.checkpoints[k.random.IntN(len(k.checkpoints))]
		policy := []string{"lazy", "cached", "complete"}[k.random.IntN(3)]
		return "restore, " + policy, k.restore(ctx, c, policy, faulty)
	}
	m := k.members[k.random.IntN(len(k.members))]
	if m.workload == torture.workload {
		return "torture", k.torture(ctx, m)
	}
	switch k.random.IntN(8) {
	case 0:
		return "remove", k.tried(ctx, faulty, func() error { return k.remove(ctx, m) })
	case 1:
		if fault == containerdKilled { // thaw checkpoint goes on without it no further, and may have stopped the container or not
			return "touch", k.use(ctx, m, "/touch")
		}
		return "checkpoint", k.freeze(ctx, m, faulty)
	case 2, 3:
		return "verify", k.use(ctx, m, "/verify")
	case 4, 5:
		return "change", k.use(ctx, m, "/change")
	default:
		return "touch", k.use(ctx, m, "/touch")
	}
}

// tried is for what may fail while something else does, and then must work.
func (k *soak) tried(ctx context.Context, faulty bool, do func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	pace := time.NewTicker(200 * time.Millisecond)
	defer pace.Stop()
	for {
		err := do()
		if err == nil || !faulty {
			return err
		}
		k.count("tried again")
		select {
		case <-ctx.Done():
			return err
		case <-pace.C:
		}
	}
}

// restore restores a checkpoint in a new pod.
func (k *soak) restore(ctx context.Context, c checkpoint, policy string, faulty bool) error {
	// A process of torture may end in an instant in which CRIU cannot have that, neither when it dumps nor when it restores.
	return k.tried(ctx, faulty || c.workload == torture.workload, func() error {
		begin := time.Now()
		m, err := k.run(ctx, c, map[string]string{"thaw.dev/policy": policy, "thaw.dev/restore": "required"})
		if err != nil {
			if strings.Count(strings.TrimSpace(err.Error()), "\n") > 0 {
				return fmt.Errorf("more than a line: %w", err)
			}
			return err
		}
		m.restored = true
		if !faulty {
			k.restoring = append(k.restoring, time.Since(begin))
		}
		return nil
	})
}

// use has a server check or change its memory. The count of its requests goes on where it was.
func (k *soak) use(ctx context.Context, m *member, path string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.pod.IP+":8080"+path, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return err
	}
	var answer struct {
		OK       bool `json:"ok"`
		Requests int  `json:"requests"`
	}
	if err := json.Unmarshal(bytes.TrimSpace(body), &answer); err != nil {
		return fmt.Errorf("%s: %q: %w", resp.Status, body, err)
	}
	m.requests++
	if !answer.OK || answer.Requests != m.requests {
		return fmt.Errorf("wrong memory: %s, it is request %d", body, m.requests)
	}
	return nil
}

// torture lets the program go on to its end, of which a wrong byte is not one.
func (k *soak) torture(ctx context.Context, m *member) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	pid, err := k.pid(ctx, m)
	if err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.SIGUSR1); err != nil {
		return err
	}
	if err := k.ended(ctx, m); err != nil {
		return err
	}
	return k.tried(ctx, true, func() error { return k.remove(ctx, m) })
}

// unknownExitCode is what containerd says of tasks that ended while it was down.
const unknownExitCode = 255

// ended waits until a container has ended with exit code 0.
func (k *soak) ended(ctx context.Context, m *member) error {
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	for {
		status, err := m.container.Status(ctx) // an error: containerd is down
		if err == nil && status.GetState() == cri.ContainerState_CONTAINER_EXITED {
			text, _ := m.container.Log()
			switch {
			case status.GetExitCode() == 0:
				return nil
			case status.GetExitCode() == unknownExitCode && !strings.Contains(text, "torture: "):
				k.count("ended while containerd was down")
				return nil
			}
			return fmt.Errorf("container %s of %s: exit code %d: %s", m.container.ID, m.ref, status.GetExitCode(), text)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("container %s of %s did not end: %w, %w", m.container.ID, m.ref, ctx.Err(), err)
		case <-pace.C:
		}
	}
}

// pid asks containerd, which may just be started, for a container's first process.
func (k *soak) pid(ctx context.Context, m *member) (pid int, err error) {
	err = k.tried(ctx, true, func() error {
		pid, err = m.container.PID(ctx)
		return err
	})
	return pid, err
}

// freeze makes a checkpoint of a container, which ends with it or goes on.
func (k *soak) freeze(ctx context.Context, m *member, faulty bool) error {
	k.images++
	c := m.checkpoint
	c.ref = k.Registry.Ref(fmt.Sprintf("soak/%d:1", k.images))
	args := []string{"checkpoint", "--quiet", "--push", c.ref, m.container.ID}
	leave := m.restored && k.random.IntN(2) == 0
	if leave {
		args = append(args[:1:1], append([]string{"--leave-running"}, args[1:]...)...)
	}
	err := k.tried(ctx, faulty, func() error {
		cmd := exec.CommandContext(ctx, filepath.Join(k.Bin, "thaw"), args...)
		cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("thaw checkpoint: %w: %s", err, bytes.TrimSpace(out))
		}
		return nil
	})
	if err != nil {
		return err
	}
	k.checkpoints = append(k.checkpoints, c)
	if !leave {
		if err := k.tried(ctx, faulty, func() error { return k.remove(ctx, m) }); err != nil {
			return err
		}
	}
	// The image that was made first goes, but for those of torture, of which there are no others.
	if i := slices.IndexFunc(k.checkpoints, func(c checkpoint) bool { return c.workload == server.workload }); len(k.checkpoints) > maxCheckpoints {
		old := k.checkpoints[i]
		k.checkpoints = slices.Delete(k.checkpoints, i, i+1)
		return k.tried(ctx, faulty, func() error { return k.RemoveImage(ctx, old.ref) })
	}
	return nil
}

// alive checks that all containers run, that the daemon knows those that were restored, and that their memory is right.
func (k *soak) alive(ctx context.Context) error {
	for _, m := range k.members {
		status, err := m.container.Status(ctx)
		if err != nil {
			return err
		}
		if status.GetState() != cri.ContainerState_CONTAINER_RUNNING {
			return fmt.Errorf("container %s of %s has ended, exit code %d: %s", m.container.ID, m.ref, status.GetExitCode(), status.GetMessage())
		}
		if m.workload == server.workload {
			if err := k.use(ctx, m, "/touch"); err != nil {
				return fmt.Errorf("container %s of %s: %w", m.container.ID, m.ref, err)
			}
		}
	}
	return nil
}
