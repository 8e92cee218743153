// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package stack runs all that thaw stands on, for real, on one machine: an OCI registry, containerd with CRI and pod
// networks, runc, CRIU, and thaw's own daemon and shim, in namespaces that take everything with them when they end.
//
// A test package's TestMain calls Main, a program's main calls Isolate; after that there can be one Stack at a time:
//
//	func TestMain(m *testing.M) { stack.Main(m) }
//
//	s, err := stack.Start(ctx, stack.Options{})
//	defer s.Close()
//	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "web", Handler: "thaw"})
//	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Registry.Ref("python:1")})
//	reply, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/")
//
// The binaries come from build/bin: `make deps build` puts them there. Because /run is private (see package isolate), all
// sockets have the paths of an ordinary node: ContainerdSocket, ThawSocket, and so on.
package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack/isolate"
	"thaw.dev/thaw/test/stack/registry"
	"thaw.dev/thaw/test/workloads"
)

// Paths of a running stack, all on the private /run.
const (
	ContainerdSocket  = "/run/containerd/containerd.sock"
	ThawStateDir      = "/run/thaw"
	ThawSocket        = ThawStateDir + "/thaw.sock"
	SnapshotterSocket = ThawStateDir + "/snapshotter.sock"
)

// RegistryAddress is where the stack's registry listens. It can be fixed because the network namespace is the stack's own.
const RegistryAddress = "127.0.0.1:5000"

// thawLogs is where thaw keeps CRIU's logs by default; here a link into Stack.Logs.
const thawLogs = "/var/log/thaw"

// CRINamespace is the containerd namespace of what CRI makes.
const CRINamespace = "k8s.io"

// Options choose how the stack is set up; the zero value is right for most tests.
type Options struct {
	// Dir holds what must lie on disk: containerd's root, thaw's cache, blobs and logs. It must not be on an overlay. Empty
	// means a new folder below build/stack that Close removes.
	Dir string
	// Snapshotter is what the handlers runc and thaw take root filesystems from; empty is overlayfs, "thaw" the daemon's.
	Snapshotter string
	// NoDaemon leaves thaw-snapshotter off; StartDaemon starts it later.
	NoDaemon bool
	// DaemonConfig is appended to the daemon's configuration file (TOML).
	DaemonConfig string
	// Progress gets a line for each step; nil for none.
	Progress io.Writer
}

// Stack is a running stack.
type Stack struct {
	// Dir is Options.Dir or what was made for it; Bin the folder with the binaries.
	Dir, Bin string
	Registry *registry.Registry

	options    Options
	temporary  bool
	lock       *os.File
	containerd *Process
	daemon     *Process
	conn       *grpc.ClientConn
	client     *containerd.Client
	runtime    cri.RuntimeServiceClient
	images     cri.ImageServiceClient
}

// Main is TestMain of packages that use a Stack.
func Main(m *testing.M) {
	isolate.Enter()
	os.Exit(m.Run())
}

// Isolate must be the first call of a program that uses a Stack: it runs the program again in namespaces of its own and
// returns only there.
func Isolate() { isolate.Enter() }

// Root is the folder of the project that the current folder is in.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "contrib", "install-deps.sh")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("%s is not in a checkout of thaw: change into one", dir)
		}
	}
}

// Start brings the stack up and returns when all of it answers. Close must be called, also to get the logs' place after a
// failed test: see Logs.
func Start(ctx context.Context, o Options) (s *Stack, err error) {
	if !isolate.Inside() {
		return nil, errors.New("stack: not isolated: call stack.Main or stack.Isolate first")
	}
	root, err := Root()
	if err != nil {
		return nil, err
	}
	s = &Stack{Bin: filepath.Join(root, "build", "bin"), options: o}
	if err := s.checkBinaries(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
			s = nil
		}
	}()
	if err := s.makeDir(filepath.Join(root, "build", "stack")); err != nil {
		return s, err
	}
	// Children are found by name as on a node: shims by containerd, runc by shims, criu by runc.
	if err := os.Setenv("PATH", s.Bin+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"); err != nil {
		return s, err
	}

	s.progress("registry on %s", RegistryAddress)
	if s.Registry, err = registry.Start(RegistryAddress, filepath.Join(s.Dir, "registry")); err != nil {
		return s, err
	}
	if err := workloads.Push(ctx, root, s.Registry.Addr(), workloads.Pause); err != nil {
		return s, err
	}
	if !o.NoDaemon && s.HasDaemon() {
		if err := s.StartDaemon(ctx); err != nil {
			return s, err
		}
	}
	if err := s.StartContainerd(ctx); err != nil {
		return s, err
	}
	if err := s.warmUp(ctx); err != nil {
		return s, fmt.Errorf("first pod: %w", err)
	}
	s.progress("ready; logs in %s", s.Logs())
	return s, nil
}

// warmUp runs a first pod. It proves that the stack works, and makes what stays for good on a node (bridge, parent cgroups,
// folders on /run), so that this is no leak of a test's first pod.
func (s *Stack) warmUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	pod, err := s.RunPod(ctx, PodOptions{Name: "first"})
	if err != nil {
		return err
	}
	_, err = pod.Run(ctx, ContainerOptions{Image: s.Registry.Ref(pauseImage)})
	if err := errors.Join(err, pod.Remove(ctx)); err != nil {
		return err
	}
	// The same for containers that CRI has nothing to do with.
	for _, args := range [][]string{
		{"image", "pull", "--hosts-dir", "/etc/containerd/certs.d", s.Registry.Ref(pauseImage)},
		{"run", "-d", "--net-host", s.Registry.Ref(pauseImage), "first"},
		{"task", "rm", "-f", "first"},
		{"container", "rm", "first"},
	} {
		if out, err := exec.CommandContext(ctx, filepath.Join(s.Bin, "ctr"), args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ctr %s: %w: %s", args[0], err, out)
		}
	}
	return nil
}

// checkBinaries names what `make deps` should have made.
func (s *Stack) checkBinaries() error {
	for _, name := range []string{"containerd", "runc", "criu"} {
		if _, err := os.Stat(filepath.Join(s.Bin, name)); err != nil {
			return fmt.Errorf("stack: %s is missing: run make deps", filepath.Join(s.Bin, name))
		}
	}
	return nil
}

// makeDir makes the stack's folder, and removes those of stacks that were killed.
func (s *Stack) makeDir(parent string) error {
	if s.options.Dir == "" {
		if err := os.MkdirAll(parent, 0o755); err != nil {
			return err
		}
		sweep(parent)
		dir, err := os.MkdirTemp(parent, "run-")
		if err != nil {
			return err
		}
		s.Dir, s.temporary = dir, true
	} else {
		dir, err := filepath.Abs(s.options.Dir)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		s.Dir = dir
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(s.Dir, &fs); err != nil {
		return err
	}
	if fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return fmt.Errorf("stack: %s is on an overlay, on which containerd's overlays cannot lie: use another folder", s.Dir)
	}
	lock, err := lockDir(s.Dir)
	if err != nil {
		return fmt.Errorf("stack: %s is in use by another stack: %w", s.Dir, err)
	}
	s.lock = lock
	if err := os.MkdirAll(filepath.Join(s.Logs(), "thaw"), 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(thawLogs); err != nil {
		return err
	}
	return os.Symlink(filepath.Join(s.Logs(), "thaw"), thawLogs)
}

// lockDir takes the lock that marks a stack's folder as in use until its process ends.
func lockDir(dir string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// sweep removes temporary folders that nobody holds any more. A folder that was just made has no lock file yet.
func sweep(parent string) {
	locks, _ := filepath.Glob(filepath.Join(parent, "run-*", "lock"))
	for _, l := range locks {
		if lock, err := lockDir(filepath.Dir(l)); err == nil {
			_ = os.RemoveAll(filepath.Dir(l))
			lock.Close()
		}
	}
}

// keepLogs moves a temporary stack's logs to where they stay until the next stack ends.
func keepLogs(logs string) error {
	last := filepath.Join(filepath.Dir(filepath.Dir(logs)), "last-log")
	if err := os.RemoveAll(last); err != nil {
		return err
	}
	if err := os.Rename(logs, last); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Close ends all pods and tasks and stops the stack, and reports what would not end. It may be called more than once.
func (s *Stack) Close() error {
	if s == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if s.runtime != nil && s.containerd.Running() {
		errs = append(errs, s.RemoveAllPods(ctx))
	}
	errs = append(errs, s.StopContainerd(ctx), s.StopDaemon(ctx))
	if s.Registry != nil {
		errs = append(errs, s.Registry.Close())
		s.Registry = nil
	}
	if s.temporary {
		errs = append(errs, keepLogs(s.Logs()), os.RemoveAll(s.Dir))
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
		s.lock = nil
	}
	return errors.Join(errs...)
}

// Logs is the folder with the servers' logs (containerd.log, thaw-snapshotter.log), below pods the containers', and below thaw
// what an ordinary node has in /var/log/thaw: CRIU's logs of failures. Of a temporary folder, Close keeps them as
// build/stack/last-log.
func (s *Stack) Logs() string { return filepath.Join(s.Dir, "log") }

// CRI gives the clients of containerd's CRI services.
func (s *Stack) CRI() (cri.RuntimeServiceClient, cri.ImageServiceClient) { return s.runtime, s.images }

// Containerd gives a client whose default namespace is CRI's.
func (s *Stack) Containerd() *containerd.Client { return s.client }

func (s *Stack) progress(format string, args ...any) {
	if s.options.Progress != nil {
		fmt.Fprintf(s.options.Progress, "stack: "+format+"\n", args...)
	}
}
