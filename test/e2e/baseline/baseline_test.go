// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package baseline tests the systems of others that benchmarks compare with: that each restores the memory that was
// checkpointed from the registry, anew each time, and leaves nothing behind.
package baseline

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

func TestMain(m *testing.M) { stack.Main(m) }

// system is what both have in common.
type system interface {
	Trial(ctx context.Context, start func()) (ip string, remove func(context.Context) error, err error)
	Close(ctx context.Context) error
}

// memory is that of the program, in bytes.
const memory = 64 << 20

func TestOthers(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	c := checkpoint(ctx, t, s)

	t.Run("eStargz", func(t *testing.T) {
		e, err := baseline.NewEstargz(ctx, s, c)
		if err != nil {
			t.Fatal(err)
		}
		tryOut(ctx, t, s, e)
	})
	t.Run("Podman", func(t *testing.T) {
		if _, err := os.Stat(filepath.Join(s.Bin, "podman")); errors.Is(err, fs.ErrNotExist) {
			t.Skip("no Podman: contrib/install-deps.sh bench installs it")
		}
		p, err := baseline.NewPodman(ctx, s, c)
		if err != nil {
			t.Fatal(err)
		}
		tryOut(ctx, t, s, p)
	})
}

// touch asks the program as often as it takes for its first reply.
func touch(ctx context.Context, ip string) error { return ask(ctx, ip, "/touch") }

func ask(ctx context.Context, ip, path string) error {
	b, err := stack.FirstReply(ctx, "http://"+ip+":8080"+path)
	if err == nil && !bytes.Contains(b, []byte(`"ok":true`)) {
		err = errors.New("wrong reply: " + string(b))
	}
	return err
}

// checkpoint makes what the systems restore.
func checkpoint(ctx context.Context, t *testing.T, s *stack.Stack) baseline.Checkpoint {
	t.Helper()
	if err := s.PushWorkloads(ctx, workloads.Synthetic); err != nil {
		t.Fatal(err)
	}
	c := baseline.Checkpoint{
		Name: workloads.Synthetic, Registry: s.Registry.Addr(), Base: s.Workload(workloads.Synthetic),
		Image: s.Registry.Ref("checkpoints/synthetic:1"), Images: filepath.Join(s.Dir, "complete"),
		Env: map[string]string{"MEMORY_MIB": "64"}, Warm: touch,
	}
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "template", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	container, err := pod.Run(ctx, stack.ContainerOptions{Image: c.Base, Env: c.Env})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Warm(ctx, pod.IP); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), "checkpoint", container.ID, "--push", c.Image)
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("thaw checkpoint: %v: %s", err, out)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureImage(ctx, c.Image, nil); err != nil {
		t.Fatal(err)
	}
	if err := baseline.Unpack(ctx, c.Image, c.Images); err != nil {
		t.Fatal(err)
	}
	return c
}

// tryOut restores twice with a system and compares what the node has before and after.
func tryOut(ctx context.Context, t *testing.T, s *stack.Stack, of system) {
	before, err := s.State(ctx)
	if err != nil {
		t.Fatal(err)
	}
	files := folders(t, s)
	for range 2 {
		started := false
		ip, remove, err := of.Trial(ctx, func() {
			started = true
			s.Registry.Reset()
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := ask(ctx, ip, "/verify"); err != nil {
			t.Error(err)
		}
		// All of its memory was read. Random memory does not compress.
		if sent := s.Registry.Traffic(nil).Sent; !started || sent < memory {
			t.Errorf("%d bytes were fetched: it was not cold", sent)
		}
		if err := remove(ctx); err != nil {
			t.Error(err)
		}
		awaitClean(ctx, t, s, before)
	}
	if err := of.Close(ctx); err != nil {
		t.Error(err)
	}
	awaitClean(ctx, t, s, before)
	if now := folders(t, s); now > files {
		t.Errorf("the stack's folder has %d entries instead of %d", now, files)
	}
}

func awaitClean(ctx context.Context, t *testing.T, s *stack.Stack, before stack.State) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := s.AwaitClean(ctx, before); err != nil {
		t.Error(err)
	}
}

// folders counts what lies in the stack's folder.
func folders(t *testing.T, s *stack.Stack) int {
	t.Helper()
	entries, err := os.ReadDir(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
