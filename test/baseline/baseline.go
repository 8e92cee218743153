// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package baseline restores checkpoints without thaw, by `runc restore` from CRIU images that lie on the disk in full: eagerly,
// or with CRIU's own lazy-pages daemon. It is what demo and benchmarks compare with.
package baseline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
)

// Bundle is a container that was made ready for `runc restore` in a pod sandbox.
type Bundle struct {
	Pod       *stack.Pod
	dir, id   string
	bin, root string
	mounted   bool
	lazy      *exec.Cmd
}

// New makes a bundle for a container of an image, with the spec that CRI gives it in a new pod of the handler runc: the same
// mounts, namespaces and cgroup that a restore by thaw gets.
func New(ctx context.Context, s *stack.Stack, image string, env map[string]string) (_ *Bundle, err error) {
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "baseline", Handler: "runc"})
	if err != nil {
		return nil, err
	}
	b := &Bundle{Pod: pod, bin: s.Bin}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Remove(context.WithoutCancel(ctx)))
		}
	}()
	c, err := pod.Create(ctx, stack.ContainerOptions{Image: image, Env: env})
	if err != nil {
		return nil, err
	}
	b.id = "baseline-" + c.ID[:12]
	if b.dir, err = os.MkdirTemp(s.Dir, "baseline-"); err != nil {
		return nil, err
	}
	b.root = filepath.Join(b.dir, "runc")
	ctx = namespaces.WithNamespace(ctx, stack.CRINamespace)
	container, err := s.Containerd().LoadContainer(ctx, c.ID)
	if err != nil {
		return nil, err
	}
	info, err := container.Info(ctx)
	if err != nil {
		return nil, err
	}
	spec, err := container.Spec(ctx)
	if err != nil {
		return nil, err
	}
	if err := b.writeSpec(spec); err != nil {
		return nil, err
	}
	mounts, err := s.Containerd().SnapshotService(info.Snapshotter).Mounts(ctx, info.SnapshotKey)
	if err != nil {
		return nil, err
	}
	rootfs := filepath.Join(b.dir, "rootfs")
	if err := os.Mkdir(rootfs, 0o755); err != nil {
		return nil, err
	}
	if err := mount.All(mounts, rootfs); err != nil {
		return nil, err
	}
	b.mounted = true
	return b, nil
}

func (b *Bundle) writeSpec(spec *oci.Spec) error {
	config := filepath.Join(b.dir, "criu.conf")
	if err := os.WriteFile(config, []byte("tcp-close\nfile-locks\next-unix-sk\n"), 0o600); err != nil {
		return err
	}
	spec.Root.Path = "rootfs"
	if spec.Annotations == nil {
		spec.Annotations = make(map[string]string)
	}
	spec.Annotations["org.criu.config"] = config
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.dir, "config.json"), text, 0o600)
}

// Images is where the complete CRIU images must be put before a restore.
func (b *Bundle) Images() string { return filepath.Join(b.dir, "images") }

// Link takes images that lie in dir and are not written to, in the place of the bundle's own.
func (b *Bundle) Link(dir string) error { return os.Symlink(dir, b.Images()) }

// Restore restores the container. lazy leaves the memory to CRIU's own daemon, which reads it from the images.
func (b *Bundle) Restore(ctx context.Context, lazy bool) error {
	work := filepath.Join(b.dir, "work")
	if err := os.MkdirAll(work, 0o700); err != nil {
		return err
	}
	args := []string{"--root", b.root, "restore", "--detach", "--bundle", b.dir, "--image-path", b.Images(), "--work-path", work}
	if lazy {
		if err := b.startDaemon(ctx, work); err != nil {
			return err
		}
		args = append(args, "--lazy-pages")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "runc"), append(args, b.id)...)
	if out, err := output(cmd, filepath.Join(b.dir, "runc.out")); err != nil {
		return fmt.Errorf("runc restore: %w: %s: %s", err, out, lastErrors(filepath.Join(work, "restore.log")))
	}
	return nil
}

// output runs a command whose descendants keep its output open, and returns what it wrote.
func output(cmd *exec.Cmd, path string) (string, error) {
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	err = cmd.Run()
	text, readErr := os.ReadFile(path)
	return strings.TrimSpace(string(text)), errors.Join(err, readErr)
}

// startDaemon starts `criu lazy-pages` and waits until it listens.
func (b *Bundle) startDaemon(ctx context.Context, work string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	b.lazy = exec.Command(filepath.Join(b.bin, "criu"), "lazy-pages", "-D", b.Images(), "-W", work, "-o", "lazy-pages.log", "--status-fd", "3")
	b.lazy.ExtraFiles = []*os.File{w}
	err = b.lazy.Start()
	w.Close()
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := r.SetReadDeadline(deadline); err != nil {
			return err
		}
	}
	if n, err := r.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("criu lazy-pages did not start: %w: %s", err, lastErrors(filepath.Join(work, "lazy-pages.log")))
	}
	return nil
}

func lastErrors(log string) string {
	text, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	var found []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "Error") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return strings.Join(found, "; ")
}

// Remove ends the container and removes all that was made.
func (b *Bundle) Remove(ctx context.Context) error {
	var errs []error
	if _, err := os.Stat(filepath.Join(b.root, b.id)); err == nil {
		out, err := exec.CommandContext(ctx, filepath.Join(b.bin, "runc"), "--root", b.root, "delete", "--force", b.id).CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("runc delete: %w: %s", err, out))
		}
	}
	if b.lazy != nil && b.lazy.Process != nil {
		// It ends by itself with the last process that it serves; if none came, it waits for ever.
		_ = b.lazy.Process.Kill()
		_ = b.lazy.Wait()
	}
	if b.mounted {
		errs = append(errs, mount.UnmountAll(filepath.Join(b.dir, "rootfs"), unix.MNT_DETACH))
	}
	errs = append(errs, b.Pod.Remove(ctx))
	if b.dir != "" {
		errs = append(errs, os.RemoveAll(b.dir))
	}
	return errors.Join(errs...)
}
