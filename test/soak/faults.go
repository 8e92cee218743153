// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
)

const containerdKilled = "containerd killed"

// fault chooses what fails during a step, which no container may notice but by waiting. It is called in a goroutine of its own;
// random numbers are drawn before.
func (k *soak) fault() (do func(context.Context) error, name string) {
	before := time.Duration(k.random.Int64N(int64(400 * time.Millisecond)))
	down := time.Duration(k.random.Int64N(int64(1500 * time.Millisecond)))
	after := func(f func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if !pause(ctx, before) {
				return ctx.Err()
			}
			return f(ctx)
		}
	}
	switch k.random.IntN(14) {
	case 0, 1:
		return after(func(ctx context.Context) error { return k.daemonKilled(ctx, down) }), "daemon killed"
	case 2:
		return after(func(ctx context.Context) error {
			return errors.Join(k.StopDaemon(ctx), k.StartDaemon(ctx))
		}), "daemon restarted"
	case 3:
		return after(func(ctx context.Context) error {
			if err := k.ContainerdProcess().Kill(); err != nil {
				return err
			}
			pause(ctx, down)
			return k.StartContainerd(ctx)
		}), containerdKilled
	case 4:
		return after(func(ctx context.Context) error { return k.registry(ctx, down, reset) }), "registry resets connections"
	case 5:
		return after(func(ctx context.Context) error { return k.registry(ctx, down, unavailable) }), "registry is down"
	case 6:
		return after(func(ctx context.Context) error { return k.registry(ctx, down, slow) }), "registry is slow"
	case 7:
		return after(func(context.Context) error { return os.RemoveAll(filepath.Join(k.ThawCache(), "pages")) }), "cache removed"
	case 8:
		return after(func(ctx context.Context) error {
			if err := os.RemoveAll(filepath.Join(k.ThawCache(), "pages")); err != nil {
				return err
			}
			return k.daemonKilled(ctx, down)
		}), "cache removed and daemon killed"
	case 9:
		return after(func(ctx context.Context) error {
			// As a power cut would: nothing of it is trusted by the next daemon.
			if err := k.Daemon().Kill(); err != nil {
				return err
			}
			files, err := filepath.Glob(filepath.Join(k.ThawCache(), "pages", "*", "boot"))
			for _, f := range files {
				err = errors.Join(err, os.WriteFile(f, []byte("1 another\n"), 0o600))
			}
			return errors.Join(err, k.StartDaemon(ctx))
		}), "cache of another boot"
	}
	return func(context.Context) error { return nil }, ""
}

// pause waits; it is false when the context has ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// daemonKilled is the daemon's end and, after a while, its next start by the service manager.
func (k *soak) daemonKilled(ctx context.Context, down time.Duration) error {
	if err := k.Daemon().Kill(); err != nil {
		return err
	}
	pause(ctx, down)
	return k.StartDaemon(ctx)
}

// expire ends the leases of pulls that containerd did not finish. They hold what was unpacked for a day; that is no leak of thaw's.
func (k *soak) expire(ctx context.Context) error {
	service := k.Containerd().LeasesService()
	ctx = namespaces.WithNamespace(ctx, stack.CRINamespace)
	all, err := service.List(ctx)
	if err != nil {
		return err
	}
	for _, l := range all {
		if _, ok := l.Labels["containerd.io/gc.expire"]; !ok {
			continue
		}
		k.expired++
		if err := service.Delete(ctx, l, leases.SynchronousDelete); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// registry lets the registry fail for a while.
func (k *soak) registry(ctx context.Context, down time.Duration, with func(http.Handler) http.Handler) error {
	k.Registry.Intercept(with)
	defer k.Registry.Intercept(nil)
	pause(ctx, down)
	return nil
}

func unavailable(http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
}

// reset breaks half of the connections off.
func reset(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rand.IntN(2) == 0 {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
}

// slow delays answers.
func slow(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		pause(r.Context(), rand.N(50*time.Millisecond))
		next.ServeHTTP(w, r)
	})
}

// lethal does what a container does not survive, or only if it needs nothing any more. It must never see a wrong page: it is dead, or right.
func (k *soak) lethal(ctx context.Context, m *member) error {
	pid, err := k.pid(ctx, m)
	if err != nil {
		return err
	}
	what := []string{"shim killed", "shim and daemon killed", "pages cut short"}[k.random.IntN(3)]
	k.count("lethal: " + what)
	switch what {
	case "pages cut short":
		err = k.cutShort(ctx)
	default:
		err = k.shimKilled(ctx, m, pid, what != "shim killed")
	}
	if err == nil {
		err = k.clean(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// shimKilled kills a container's shim, and the daemon before or after it. A container that was restored is dead then; another lives
// until its pod is removed.
func (k *soak) shimKilled(ctx context.Context, m *member, pid int, daemon bool) error {
	shim, err := m.pod.ShimPID()
	if err != nil {
		return err
	}
	if err := unix.Kill(shim, unix.SIGKILL); err != nil {
		return err
	}
	if daemon {
		if err := k.daemonKilled(ctx, 0); err != nil {
			return err
		}
	}
	if err := k.tried(ctx, true, func() error { return k.remove(ctx, m) }); err != nil {
		return err
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("process %d of container %s outlives its pod: %w", pid, m.container.ID, err)
	}
	return stack.RemoveDeadSockets()
}

// cutShort cuts the page store's files short under all containers. Each of them checks all of its memory: it answers rightly or is dead.
func (k *soak) cutShort(ctx context.Context) error {
	files, err := filepath.Glob(filepath.Join(k.ThawCache(), "pages", "*", "data"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := os.Truncate(f, 4096); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	for _, m := range append([]*member(nil), k.members...) {
		if m.workload == server.workload && k.use(ctx, m, "/verify") == nil {
			// What it has beside the memory that it checks may still be missing, and kills it when it is touched.
			k.count("lives on with all of its pages")
		} else if m.workload == server.workload {
			code, err := m.container.Wait(ctx)
			if err != nil || code != 137 {
				return fmt.Errorf("container %s of %s: exit code %d, %w", m.container.ID, m.ref, code, err)
			}
			k.count("killed for its pages")
		}
		if err := k.remove(ctx, m); err != nil {
			return err
		}
	}
	return nil
}
