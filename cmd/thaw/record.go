// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
	"thaw.dev/thaw/snapshotter/restore"
)

var workingsetRecordCommand = &cli.Command{
	Name:      "record",
	Usage:     "record an image's working set by a trial restore on this node",
	ArgsUsage: "REF",
	Description: `The image is restored in a pod of its own through CRI, which is removed at the end.
With --probe it is asked over HTTP until it answers with a success, as a readiness
probe does; what it touches for that, and until it is quiet, is recorded.

The trial has the mounts and rights of a plain pod. An image that needs others is
refused with the reason: give them with --pod-config and --container-config, in
the form that crictl has for these files.

Examples:
  thaw workingset record --probe 8080/healthz registry.example/agents/warm:1
  thaw workingset push registry.example/agents/warm:1`,
	Flags: []cli.Flag{
		&cli.StringFlag{Name: "probe", Usage: "`PORT/PATH` to ask after the restore"},
		&cli.StringFlag{Name: "pod-config", Usage: "JSON `FILE` with a CRI PodSandboxConfig"},
		&cli.StringFlag{Name: "container-config", Usage: "JSON `FILE` with a CRI ContainerConfig"},
		&cli.StringFlag{Name: "handler", Value: "thaw", Usage: "runtime `HANDLER` of the pod"},
		&cli.DurationFlag{Name: "timeout", Value: 2 * time.Minute, Usage: "give up after so long"},
		addressFlag, socketFlag, configFlag,
	},
	OnUsageError: onUsageError,
	Action:       runWorkingsetRecord,
}

func runWorkingsetRecord(c *cli.Context) error {
	args, err := arguments(c, "REF")
	if err != nil {
		return err
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	t := &recording{image: args[0], handler: c.String("handler"), socket: daemonSocket(c, cfg)}
	if p := c.String("probe"); p != "" {
		port, path, _ := strings.Cut(p, "/")
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return usagef("record: --probe %q: use PORT/PATH", p)
		}
		t.port, t.path = port, "/"+path
	}
	if err := t.configure(c.String("pod-config"), c.String("container-config")); err != nil {
		return fmt.Errorf("workingset record: %w", err)
	}
	ctx, cancel := context.WithTimeout(c.Context, c.Duration("timeout"))
	defer cancel()
	chunks, err := t.record(ctx, criAddress(c, cfg))
	if err != nil {
		return fmt.Errorf("workingset record: %w", err)
	}
	_, err = fmt.Fprintf(c.App.Writer, "recorded %d chunks of %s\n", chunks, t.image)
	return err
}

func criAddress(c *cli.Context, cfg *config.Config) string {
	if a := c.String(addressFlag.Name); a != "" {
		return a
	}
	return cfg.Containerd.Address
}

// recording is a trial restore.
type recording struct {
	image, handler string
	socket         string // the daemon's
	port, path     string // of the probe, if port is not empty
	pod            *cri.PodSandboxConfig
	container      *cri.ContainerConfig
}

// The paths that Kubernetes masks and makes read-only in containers that are not
// privileged (k8s.io/kubernetes pkg/securitycontext).
var (
	maskedPaths = []string{
		"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
		"/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// configure reads the files, and fills in what they, or a plain pod, need.
func (t *recording) configure(pod, container string) error {
	namespaces := &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}
	t.pod = &cri.PodSandboxConfig{
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: namespaces}},
	}
	t.container = &cri.ContainerConfig{
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: namespaces, MaskedPaths: maskedPaths, ReadonlyPaths: readonlyPaths,
			},
		},
	}
	if err := errors.Join(readConfig(pod, t.pod), readConfig(container, t.container)); err != nil {
		return err
	}
	name := "workingset-" + strings.ToLower(rand.Text()[:8])
	t.pod.Metadata = &cri.PodSandboxMetadata{Name: name, Uid: name, Namespace: "thaw"}
	t.container.Metadata = &cri.ContainerMetadata{Name: "trial"}
	t.container.Image = &cri.ImageSpec{Image: t.image, UserSpecifiedImage: t.image}
	for _, a := range []*map[string]string{&t.pod.Annotations, &t.container.Annotations} {
		if *a == nil {
			*a = make(map[string]string)
		}
		(*a)[restore.AnnotationRestore] = "required"
		(*a)[restore.AnnotationWorkingSet] = "record"
	}
	return nil
}

// maxConfigFile bounds the files in bytes.
const maxConfigFile = 1 << 20

func readConfig(path string, into any) error {
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if err != nil {
		return err
	}
	if len(p) > maxConfigFile {
		return fmt.Errorf("%s is over the limit of %d bytes", path, maxConfigFile)
	}
	if err := json.Unmarshal(p, into); err != nil {
		return fmt.Errorf("%s: %w: use JSON as for crictl", path, err)
	}
	return nil
}

// record restores the image and returns how many chunks were recorded.
func (t *recording) record(ctx context.Context, address string) (_ uint64, err error) {
	conn, err := grpc.NewClient("unix://"+strings.TrimPrefix(address, "unix://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	runtime, images := cri.NewRuntimeServiceClient(conn), cri.NewImageServiceClient(conn)
	if _, err := list(ctx, t.socket); err != nil {
		return 0, err
	}
	status, err := images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: t.container.Image})
	if err != nil {
		return 0, fmt.Errorf("containerd's CRI at %s: %w", address, err)
	}
	if status.GetImage() == nil {
		if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: t.container.Image, SandboxConfig: t.pod}); err != nil {
			return 0, fmt.Errorf("pull %s: %w", t.image, err)
		}
	}
	pod, err := runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: t.pod, RuntimeHandler: t.handler})
	if err != nil {
		return 0, fmt.Errorf("trial pod: %w", err)
	}
	defer func() { err = errors.Join(err, removePod(context.WithoutCancel(ctx), runtime, pod.GetPodSandboxId())) }()
	created, err := runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: t.container, SandboxConfig: t.pod})
	if err != nil {
		return 0, fmt.Errorf("trial container: %w", err)
	}
	if _, err := runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: created.GetContainerId()}); err != nil {
		return 0, fmt.Errorf("trial restore: %w", err)
	}
	if t.port != "" {
		sandbox, err := runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod.GetPodSandboxId()})
		if err != nil {
			return 0, fmt.Errorf("trial pod: %w", err)
		}
		if err := probe(ctx, "http://"+net.JoinHostPort(sandbox.GetStatus().GetNetwork().GetIp(), t.port)+t.path); err != nil {
			return 0, err
		}
	}
	return t.wait(ctx, created.GetContainerId())
}

// removeTimeout bounds the removal of a trial's pod.
const removeTimeout = 30 * time.Second

func removePod(ctx context.Context, runtime cri.RuntimeServiceClient, id string) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	if _, err := runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("the trial's pod %.13s is left over, remove it with crictl rmp -f: %w", id, err)
	}
	if _, err := runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("the trial's pod %.13s is left over, remove it with crictl rmp -f: %w", id, err)
	}
	return nil
}

const (
	probeEvery = 100 * time.Millisecond
	probeWaits = 10 * time.Second // for one answer
)

// probe asks until the answer is a success.
func probe(ctx context.Context, url string) error {
	client := &http.Client{Timeout: probeWaits, Transport: &http.Transport{DisableKeepAlives: true}}
	pace := time.NewTicker(probeEvery)
	defer pace.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode < http.StatusBadRequest {
				return nil
			}
			err = fmt.Errorf("%s: %s", url, resp.Status)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the probe had no success: %w", err)
		case <-pace.C:
		}
	}
}

// wait returns when the recording is over.
func (t *recording) wait(ctx context.Context, container string) (uint64, error) {
	pace := time.NewTicker(probeEvery)
	defer pace.Stop()
	for {
		resp, err := list(ctx, t.socket)
		if err != nil {
			return 0, err
		}
		var status *api.Status
		for _, r := range resp.Restores {
			if r.ContainerId == container {
				status = r
			}
		}
		switch {
		case status == nil:
			return 0, errors.New("the trial was not restored: the container has ended, or its runtime handler is not thaw's")
		case status.State == restore.StateFailed:
			return 0, fmt.Errorf("the trial failed: %s", status.Reason)
		case status.RecordedChunks > 0:
			return status.RecordedChunks, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("nothing was recorded in time (is the policy complete? then there is nothing to record): %w", ctx.Err())
		case <-pace.C:
		}
	}
}
