// SPDX-License-Identifier: Apache-2.0

//go:build linux

package baseline

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
)

// Podman restores with Podman, from a checkpoint image that Podman made of the same program in the same state.
//
// Its containers use the stack's network namespace, so that no network has to be set up, as there is none to be for a container in a pod
// whose sandbox runs; the program's own image stays in its storage all the time. That is on overlayfs, which was a little sooner
// than the driver vfs. crun cannot take runc's place where cgroups are a hybrid of both versions.
type Podman struct {
	bin   string // folder of binaries
	dir   string // storage and state
	image string // what trials pull
}

// podmanName is the container that is checkpointed; restored ones inherit it.
const podmanName = "warm"

// podmanConfig is how Podman is run in the stack: with the stack's runc and so CRIU, without systemd, with nothing below
// folders of the host. Its own default limits need CAP_SYS_RESOURCE. Like the stack's other containers, its own have no seccomp filter.
const podmanConfig = `[engine]
cgroup_manager = "cgroupfs"
conmon_path = ["%[1]s/podman/usr/bin/conmon"]
helper_binaries_dir = ["%[1]s/podman/usr/lib/podman"]
events_logger = "none"
image_copy_tmp_dir = "storage"
lock_type = "file"
runtime = "runc"
tmp_dir = "%[2]s/state"
[engine.runtimes]
runc = ["%[1]s/bin/runc"]
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "none"
netns = "host"
seccomp_profile = "unconfined"
`

const podmanRegistries = `[[registry]]
location = %q
insecure = true
[[registry]]
location = %q
insecure = true
`

const podmanStorage = `[storage]
driver = "overlay"
graphroot = "%[1]s/storage"
runroot = "%[1]s/run"
`

// NewPodman starts the program under Podman, warms it up, and writes its checkpoint to the stack's registry.
func NewPodman(ctx context.Context, s *stack.Stack, c Checkpoint) (_ *Podman, err error) {
	const repository = "podman/"
	// The same folder each time, because checkpoints name files in it.
	p := &Podman{bin: s.Bin, dir: filepath.Join(s.Dir, "podman"), image: c.Registry + "/" + repository + c.Name + ":1"}
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close(context.WithoutCancel(ctx)))
		}
	}()
	if err := p.configure(); err != nil {
		return nil, err
	}
	if err := p.run(ctx, "pull", c.Base); err != nil {
		return nil, err
	}
	pushed := s.Registry.Ref(repository + c.Name + ":1")
	ref, err := name.ParseReference(pushed, name.Insecure)
	if err != nil {
		return nil, err
	}
	if exists(ctx, ref) {
		return p, nil
	}
	return p, p.checkpoint(ctx, c, pushed)
}

func (p *Podman) configure() error {
	// Podman looks for this one nowhere else.
	const policy = "/etc/containers/policy.json"
	if err := os.MkdirAll(filepath.Dir(policy), 0o755); err != nil {
		return err
	}
	for path, content := range map[string]string{
		p.file("containers.conf"): fmt.Sprintf(podmanConfig, filepath.Dir(p.bin), p.dir),
		p.file("registries.conf"): fmt.Sprintf(podmanRegistries, stack.RegistryAddress, stack.ShapedAddress),
		p.file("storage.conf"):    fmt.Sprintf(podmanStorage, p.dir),
		policy:                    `{"default": [{"type": "insecureAcceptAnything"}]}`,
	} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// checkpoint makes the image and leaves nothing of it on the node.
func (p *Podman) checkpoint(ctx context.Context, c Checkpoint, image string) error {
	args := []string{"run", "--detach", "--name", podmanName}
	for k, v := range c.Env {
		args = append(args, "--env", k+"="+v)
	}
	if err := p.run(ctx, append(args, c.Base)...); err != nil {
		return err
	}
	if err := c.Warm(ctx, podmanIP); err != nil {
		return err
	}
	for _, args := range [][]string{
		// Connections that the warm-up closed may not be gone yet.
		{"container", "checkpoint", "--tcp-established", "--create-image", image, podmanName},
		// The compression with which programs' memory is restored soonest. Of random memory gzip is, by about a seventh.
		{"push", "--compression-format", "zstd", image},
		{"rm", "--force", podmanName},
		{"rmi", image},
	} {
		if err := p.run(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// podmanIP is where programs in the stack's network namespace are reached.
const podmanIP = "127.0.0.1"

// Trial calls start, pulls the checkpoint image, restores it, and returns as soon as the program runs. The program's server has the
// address ip; remove takes all away again but the program's image.
func (p *Podman) Trial(ctx context.Context, start func()) (ip string, remove func(context.Context) error, err error) {
	remove = func(ctx context.Context) error {
		return errors.Join(p.run(ctx, "rm", "--force", "--ignore", "--time", "0", podmanName), p.run(ctx, "rmi", "--force", "--ignore", p.image))
	}
	start()
	if err := p.restore(ctx); err != nil {
		return "", nil, errors.Join(err, remove(context.WithoutCancel(ctx)))
	}
	return podmanIP, remove, nil
}

func (p *Podman) restore(ctx context.Context) error {
	if err := p.run(ctx, "pull", "--quiet", p.image); err != nil {
		return err
	}
	return p.run(ctx, "container", "restore", "--tcp-established", p.image)
}

// run runs podman to its end.
func (p *Podman) run(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "podman"), args...)
	cmd.Env = append(os.Environ(),
		"CONTAINERS_CONF="+p.file("containers.conf"), "CONTAINERS_REGISTRIES_CONF="+p.file("registries.conf"),
		"CONTAINERS_STORAGE_CONF="+p.file("storage.conf"), "TMPDIR="+p.dir, "PODMAN_IGNORE_CGROUPSV1_WARNING=1")
	// To a file, because conmon and with it the container keep it open.
	if out, err := output(cmd, p.file("podman.out")); err != nil {
		return fmt.Errorf("podman %s: %w: %s", args[0], err, out)
	}
	return nil
}

func (p *Podman) file(name string) string { return filepath.Join(p.dir, name) }

// Close removes Podman's storage, with all that is left in it.
func (p *Podman) Close(ctx context.Context) error {
	err := p.run(ctx, "rm", "--all", "--force", "--time", "0")
	return errors.Join(err, mount.UnmountRecursive(p.dir, unix.MNT_DETACH), os.RemoveAll(p.dir))
}
