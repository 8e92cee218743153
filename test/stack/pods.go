// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodOptions describe a pod sandbox.
type PodOptions struct {
	Name        string // made unique by the stack
	Handler     string // the runtime handler: "", runc or thaw
	Annotations map[string]string
	// Pid is the pod's PID namespace mode; nil is one namespace a container, as Kubernetes has it.
	Pid *cri.NamespaceMode
	// Change may edit the configuration before it is sent.
	Change func(*cri.PodSandboxConfig)
}

// Pod is a running pod sandbox.
type Pod struct {
	ID     string
	IP     string
	Config *cri.PodSandboxConfig
	stack  *Stack
}

// podNumber makes names and UIDs of pods unique, as CRI demands.
var podNumber atomic.Int64

// RunPod runs a pod sandbox.
func (s *Stack) RunPod(ctx context.Context, o PodOptions) (*Pod, error) {
	n := strconv.FormatInt(podNumber.Add(1), 10)
	name := strings.TrimPrefix(o.Name+"-"+n, "-")
	pid := cri.NamespaceMode_CONTAINER
	if o.Pid != nil {
		pid = *o.Pid
	}
	config := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Uid: "uid-" + n, Namespace: "default"},
		Hostname:     name,
		LogDirectory: filepath.Join(s.Logs(), "pods", name),
		Annotations:  maps.Clone(o.Annotations),
		Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{Pid: pid}},
		},
	}
	if o.Change != nil {
		o.Change(config)
	}
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		return nil, err
	}
	run, err := s.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: o.Handler})
	if err != nil {
		return nil, fmt.Errorf("run pod %s: %w", name, err)
	}
	pod := &Pod{ID: run.GetPodSandboxId(), Config: config, stack: s}
	status, err := s.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod.ID})
	if err != nil {
		return nil, errors.Join(err, pod.Remove(ctx))
	}
	pod.IP = status.GetStatus().GetNetwork().GetIp()
	return pod, nil
}

// removeTimeout bounds how long Pod.Remove tries again.
const removeTimeout = 20 * time.Second

// Remove stops and removes the pod with all its containers. A pod that is gone is no error. Like the kubelet it tries again when
// containerd refuses: after a shim has crashed, containerd takes a moment to notice that the containers are gone too.
func (p *Pod) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	pace := time.NewTicker(50 * time.Millisecond)
	defer pace.Stop()
	for {
		err := p.remove(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-pace.C:
		}
	}
}

func (p *Pod) remove(ctx context.Context) error {
	if _, err := p.stack.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		return fmt.Errorf("stop pod: %w", err)
	}
	if _, err := p.stack.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		return fmt.Errorf("remove pod: %w", err)
	}
	return nil
}

// RemoveAllPods removes every pod that CRI knows of.
func (s *Stack) RemoveAllPods(ctx context.Context) error {
	list, err := s.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var errs []error
	for _, item := range list.GetItems() {
		errs = append(errs, (&Pod{ID: item.GetId(), stack: s}).Remove(ctx))
	}
	return errors.Join(errs...)
}

// ContainerOptions describe a container in a pod.
type ContainerOptions struct {
	Name          string // empty: "main"
	Image         string // full reference; pulled if it is not there
	Command, Args []string
	Env           map[string]string
	Annotations   map[string]string
	Mounts        []*cri.Mount
	Attempt       uint32
	Tty           bool
	// Change may edit the configuration before it is sent.
	Change func(*cri.ContainerConfig)
}

// Container is a container in a pod.
type Container struct {
	ID     string
	Pod    *Pod
	Config *cri.ContainerConfig
}

// The paths that Kubernetes has masked and made read-only in containers that are not privileged.
var (
	maskedPaths = []string{
		"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
		"/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// Create creates a container without starting it.
func (p *Pod) Create(ctx context.Context, o ContainerOptions) (*Container, error) {
	if o.Name == "" {
		o.Name = "main"
	}
	if err := p.stack.EnsureImage(ctx, o.Image, p.Config); err != nil {
		return nil, err
	}
	config := &cri.ContainerConfig{
		Metadata:    &cri.ContainerMetadata{Name: o.Name, Attempt: o.Attempt},
		Image:       &cri.ImageSpec{Image: o.Image, UserSpecifiedImage: o.Image},
		Command:     o.Command,
		Args:        o.Args,
		Annotations: maps.Clone(o.Annotations),
		Mounts:      o.Mounts,
		LogPath:     fmt.Sprintf("%s_%d.log", o.Name, o.Attempt),
		Tty:         o.Tty,
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
				MaskedPaths:      maskedPaths,
				ReadonlyPaths:    readonlyPaths,
			},
		},
	}
	for k, v := range o.Env {
		config.Envs = append(config.Envs, &cri.KeyValue{Key: k, Value: []byte(v)})
	}
	if o.Change != nil {
		o.Change(config)
	}
	created, err := p.stack.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config})
	if err != nil {
		return nil, fmt.Errorf("create container %s: %w", o.Name, err)
	}
	return &Container{ID: created.GetContainerId(), Pod: p, Config: config}, nil
}

// Run creates and starts a container. If the start fails, the container is left for inspection; the pod's removal takes it.
func (p *Pod) Run(ctx context.Context, o ContainerOptions) (*Container, error) {
	c, err := p.Create(ctx, o)
	if err != nil {
		return nil, err
	}
	return c, c.Start(ctx)
}

// Start starts the container.
func (c *Container) Start(ctx context.Context) error {
	if _, err := c.Pod.stack.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ID}); err != nil {
		return fmt.Errorf("start container %s: %w", c.Config.GetMetadata().GetName(), err)
	}
	return nil
}

// Stop stops the container with a grace period in seconds.
func (c *Container) Stop(ctx context.Context, grace int64) error {
	_, err := c.Pod.stack.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.ID, Timeout: grace})
	return err
}

// Remove removes the container, running or not.
func (c *Container) Remove(ctx context.Context) error {
	_, err := c.Pod.stack.runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: c.ID})
	return err
}

// Status gives CRI's view of the container.
func (c *Container) Status(ctx context.Context) (*cri.ContainerStatus, error) {
	r, err := c.Pod.stack.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.ID})
	return r.GetStatus(), err
}

// Exec runs a command in the container and gives its standard output. An exit code other than 0 is an error that quotes
// standard error. The deadline of ctx is also the command's.
func (c *Container) Exec(ctx context.Context, command ...string) (string, error) {
	var seconds int64
	if deadline, ok := ctx.Deadline(); ok {
		seconds = int64(time.Until(deadline).Seconds()) + 1
	}
	r, err := c.Pod.stack.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: command, Timeout: seconds})
	if err != nil {
		return "", fmt.Errorf("exec %q: %w", command, err)
	}
	if r.GetExitCode() != 0 {
		return string(r.GetStdout()), fmt.Errorf("exec %q: exit code %d: %s", command, r.GetExitCode(), strings.TrimSpace(string(r.GetStderr())))
	}
	return string(r.GetStdout()), nil
}

// Log gives what the container wrote so far, in the kubelet's format: time, stream, F or P, text.
func (c *Container) Log() (string, error) {
	text, err := os.ReadFile(filepath.Join(c.Pod.Config.GetLogDirectory(), c.Config.GetLogPath()))
	return string(text), err
}

// Task gives containerd's view of the container's processes.
func (c *Container) Task(ctx context.Context) (containerd.Task, error) {
	container, err := c.Pod.stack.client.LoadContainer(ctx, c.ID)
	if err != nil {
		return nil, err
	}
	return container.Task(ctx, nil)
}

// PID is the container's first process, in the stack's PID namespace.
func (c *Container) PID(ctx context.Context) (int, error) {
	task, err := c.Task(ctx)
	if err != nil {
		return 0, err
	}
	return int(task.Pid()), nil
}

// Wait waits until the container's first process has ended and gives its exit code.
func (c *Container) Wait(ctx context.Context) (uint32, error) {
	task, err := c.Task(ctx)
	if err != nil {
		return 0, err
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		return 0, err
	}
	select {
	case status := <-exit:
		return status.ExitCode(), status.Error()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// ShimPID is the process of the pod's shim, in the stack's PID namespace.
func (p *Pod) ShimPID() (int, error) {
	text, err := os.ReadFile(filepath.Join("/run/containerd/io.containerd.runtime.v2.task", CRINamespace, p.ID, "shim.pid"))
	if err == nil {
		return strconv.Atoi(strings.TrimSpace(string(text)))
	}
	// containerd does not write that file for shims that it starts over a bootstrap; they carry the pod's ID as an argument.
	return findProcess(func(args []string) bool {
		if !strings.HasPrefix(filepath.Base(args[0]), "containerd-shim-") {
			return false
		}
		for i := 1; i+1 < len(args); i++ {
			if args[i] == "-id" && args[i+1] == p.ID {
				return true
			}
		}
		return false
	})
}

// EnsureImage pulls an image for a pod (whose handler chooses the snapshotter) unless it is there.
func (s *Stack) EnsureImage(ctx context.Context, ref string, pod *cri.PodSandboxConfig) error {
	spec := &cri.ImageSpec{Image: ref}
	status, err := s.images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: spec})
	if err != nil {
		return fmt.Errorf("image %s: %w", ref, err)
	}
	if status.GetImage() != nil {
		return nil
	}
	_, err = s.Pull(ctx, ref, pod)
	return err
}

// Pull pulls an image through CRI, for pod if that is not nil, and gives its ID.
func (s *Stack) Pull(ctx context.Context, ref string, pod *cri.PodSandboxConfig) (string, error) {
	r, err := s.images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref, UserSpecifiedImage: ref}, SandboxConfig: pod})
	if err != nil {
		return "", fmt.Errorf("pull %s: %w", ref, err)
	}
	return r.GetImageRef(), nil
}

// RemoveImage removes an image from the node, and its content with it.
func (s *Stack) RemoveImage(ctx context.Context, ref string) error {
	_, err := s.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	return err
}

// PruneImages removes all images but the pause image.
func (s *Stack) PruneImages(ctx context.Context) error {
	list, err := s.images.ListImages(ctx, &cri.ListImagesRequest{})
	if err != nil {
		return err
	}
	var errs []error
	for _, image := range list.GetImages() {
		if !image.GetPinned() {
			errs = append(errs, s.RemoveImage(ctx, image.GetId()))
		}
	}
	return errors.Join(errs...)
}

// FirstReply asks url until a server answers with status 200 and gives the body. Until the deadline of ctx it tries again as
// soon as an attempt fails, at most every millisecond, so that the time until it returns is the time to the first reply.
func FirstReply(ctx context.Context, url string) ([]byte, error) {
	// A connection for each attempt: a kept one would belong to a server that is gone after a checkpoint.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for {
		body, err := get(ctx, client, url)
		if err == nil {
			return body, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("no reply: %w", err)
		case <-pace.C:
		}
	}
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s: %s", url, resp.Status, strings.TrimSpace(string(body)))
	}
	return body, nil
}
