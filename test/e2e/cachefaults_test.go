// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// verifyOnce asks the server once to check all of its memory. A wrong byte fails the test; an error is that there was no answer.
func verifyOnce(ctx context.Context, t *testing.T, pod *stack.Pod) error {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+pod.IP+":8080/verify", nil)
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
	if resp.StatusCode != http.StatusOK || !bytes.Contains(body, []byte(`"ok":true`)) {
		t.Errorf("wrong memory: %s", body)
	}
	return nil
}

// touched restores a checkpoint lazily and has some of its memory touched.
func touched(ctx context.Context, t *testing.T, s *stack.Stack, ref string) (*stack.Pod, *stack.Container) {
	t.Helper()
	pod, c := lazily(ctx, t, s, ref)
	if _, err := get(ctx, pod, "/touch"); err != nil {
		t.Fatal(err)
	}
	return pod, c
}

// dies checks that a container is killed for a reason that thaw's shim tells, and that its server never says that its memory is
// right or wrong.
func dies(ctx context.Context, t *testing.T, s *stack.Stack, pod *stack.Pod, c *stack.Container, reason string) {
	t.Helper()
	asking, stop := context.WithCancel(ctx)
	defer stop()
	answered := make(chan error, 1)
	go func() { answered <- verifyOnce(asking, t, pod) }()
	code, err := c.Wait(ctx)
	stop()
	if err := <-answered; err == nil {
		t.Error("the server checked all of its memory")
	}
	if err != nil || code != 137 {
		t.Errorf("exit code %d, %v", code, err)
	}
	text, err := os.ReadFile(filepath.Join(s.Logs(), "containerd.log"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, c.ID) && strings.Contains(line, reason) {
			return
		}
	}
	t.Errorf("no line in containerd's log says %q", reason)
}

// onDisk lets the daemon run on another file system in the place of its cache until the test ends.
func onDisk(ctx context.Context, t *testing.T, s *stack.Stack, mount func(dir string) error) {
	t.Helper()
	if err := s.StopDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.ThawCache(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := mount(s.ThawCache()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		err := errors.Join(s.RemoveAllPods(ctx), s.StopDaemon(ctx), unix.Unmount(s.ThawCache(), unix.MNT_DETACH), s.StartDaemon(ctx))
		if err != nil {
			t.Error(err)
		}
	})
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
}

// chunksPresent counts the chunks in the node's page store.
func chunksPresent(t *testing.T, s *stack.Stack) (n int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.ThawCache(), "pages", "*", "present"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		p, err := os.ReadFile(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range p {
			n += bits.OnesCount8(b)
		}
	}
	return n
}

// filled waits until the daemon has fetched chunks in the background.
func filled(ctx context.Context, t *testing.T, s *stack.Stack, chunks int) {
	t.Helper()
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	for chunksPresent(t, s) < chunks {
		select {
		case <-pace.C:
		case <-ctx.Done():
			t.Fatalf("%d chunks are in the page store, %d are expected", chunksPresent(t, s), chunks)
		}
	}
}

// syntheticChunks is about how many chunks of 128 KiB the server's memory has.
const syntheticChunks = 64 << 20 / (128 << 10)

// TestCacheDiskFull: pages of containers that are gone make room, those of others never; a container for whose pages no room
// can be made is killed with that reason.
func TestCacheDiskFull(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	first, second := frozenSynthetic(ctx, t, s), frozenSynthetic(ctx, t, s)
	onDisk(ctx, t, s, func(dir string) error { return unix.Mount("none", dir, "tmpfs", 0, "size=100m,mode=0700") })
	old, _ := touched(ctx, t, s, first)
	if err := verifyOnce(ctx, t, old); err != nil {
		t.Fatal(err)
	}
	if err := old.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	pod, _ := touched(ctx, t, s, second)
	if err := verifyOnce(ctx, t, pod); err != nil {
		t.Fatal(err)
	}
	next, c := lazily(ctx, t, s, first)
	dies(ctx, t, s, next, c, "the disk of "+s.ThawCache())
	if err := verifyOnce(ctx, t, pod); err != nil {
		t.Errorf("the one that had its pages: %v", err)
	}
}

// TestCacheDiskFails: pages that the disk does not take are no wrong pages. The disk is a loop device on a file system that is
// too small for it.
func TestCacheDiskFails(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	backing := t.TempDir()
	if err := unix.Mount("none", backing, "tmpfs", 0, "size=24m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(backing, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	disk := filepath.Join(backing, "disk")
	onDisk(ctx, t, s, func(dir string) error {
		var device []byte
		for _, c := range [][]string{
			{"truncate", "-s", "200m", disk}, {"mkfs.ext4", "-q", "-O", "^has_journal", disk}, {"losetup", "--find", "--show", disk},
		} {
			var err error
			if device, err = exec.CommandContext(ctx, c[0], c[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", c[0], err, device)
			}
		}
		loop := strings.TrimSpace(string(device))
		if err := unix.Mount(loop, dir, "ext4", 0, "errors=continue"); err != nil {
			return err
		}
		// It goes with the mount.
		return exec.CommandContext(ctx, "losetup", "--detach", loop).Run()
	})
	pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{Env: synthetic}) // filled in the background
	filled(ctx, t, s, syntheticChunks*9/10)
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	dies(ctx, t, s, pod, c, "the disk did not take what was written")
}

// TestCacheDamaged: what happens to the cache folder while containers use it is found out, and costs at most those whose pages
// are gone.
func TestCacheDamaged(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	each := func(t *testing.T, name string, damage func(path string) error) {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(s.ThawCache(), "pages", "*", name))
		if err != nil || len(files) == 0 {
			t.Fatalf("%d files %s, %v", len(files), name, err)
		}
		for _, f := range files {
			if err := damage(f); err != nil {
				t.Fatal(err)
			}
		}
	}
	works := func(t *testing.T) {
		t.Helper()
		pod, _ := lazily(ctx, t, s, ref)
		if err := verifyOnce(ctx, t, pod); err != nil {
			t.Error(err)
		}
	}
	t.Run("pages cut short", func(t *testing.T) {
		pod, c := touched(ctx, t, s, ref)
		each(t, "data", func(path string) error { return os.Truncate(path, 1<<20) })
		dies(ctx, t, s, pod, c, "somebody has changed the cache folder")
		works(t)
	})
	t.Run("bitmap cut short", func(t *testing.T) {
		pod, c := touched(ctx, t, s, ref)
		each(t, "present", func(path string) error { return os.Truncate(path, 0) })
		shim, err := pod.ShimPID()
		if err != nil {
			t.Fatal(err)
		}
		dies(ctx, t, s, pod, c, "page store cannot be read")
		if err := unix.Kill(shim, 0); err != nil {
			t.Errorf("the shim: %v", err)
		}
		each(t, "present", os.Remove)
		works(t)
	})
	t.Run("removed", func(t *testing.T) {
		one, _ := touched(ctx, t, s, ref)
		two, _ := touched(ctx, t, s, ref)
		if err := os.RemoveAll(s.ThawCache()); err != nil {
			t.Fatal(err)
		}
		if err := verifyOnce(ctx, t, one); err != nil {
			t.Errorf("with the same daemon: %v", err)
		}
		works(t)
		if err := s.Daemon().Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.StartDaemon(ctx); err != nil {
			t.Fatal(err)
		}
		if err := verifyOnce(ctx, t, two); err != nil {
			t.Errorf("with the next daemon: %v", err)
		}
	})
}

// TestReboot: what the disk has after a power cut is not what was written to it.
func TestReboot(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, _ := lazily(ctx, t, s, ref)
	if err := verifyOnce(ctx, t, pod); err != nil {
		t.Fatal(err)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.Daemon().Kill(); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(s.ThawCache(), "*", "*", "data"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	metadata, err := filepath.Glob(filepath.Join(s.ThawCache(), "metadata", "*"))
	if err != nil || len(metadata) == 0 {
		t.Fatal(metadata, err)
	}
	for _, path := range append(files, metadata...) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		info, err := f.Stat()
		if err == nil {
			_, err = f.WriteAt(make([]byte, info.Size()), 0)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range files {
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), "boot"), []byte("1 00000000-0000-4000-8000-000000000000\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(stack.ThawStateDir); err != nil { // a tmpfs
		t.Fatal(err)
	}
	if err := s.StartDaemon(ctx); err != nil {
		t.Fatal(err)
	}
	pod, _ = lazily(ctx, t, s, ref)
	if err := verifyOnce(ctx, t, pod); err != nil {
		t.Error(err)
	}
}
