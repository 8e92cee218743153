// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Labels and annotations of CRI and nerdctl containers.
const (
	labelKind        = "io.cri-containerd.kind"
	labelName        = "io.kubernetes.container.name"
	labelNerdctlName = "nerdctl/name"
	annotationName   = "io.kubernetes.cri.container-name"
	annotationImage  = "io.kubernetes.cri.image-name"
	namespaceKubelet = "k8s.io"
	namespaceUsual   = "default"
)

// Container is a container that may be dumped.
type Container struct {
	// Namespace is containerd's.
	Namespace string

	info containers.Container
	spec specs.Spec
	c    containerd.Container
}

// ID is the container's whole ID.
func (c *Container) ID() string { return c.info.ID }

// Name is what people call the container.
func (c *Container) Name() string {
	for _, n := range []string{c.spec.Annotations[annotationName], c.info.Labels[labelName], c.info.Labels[labelNerdctlName]} {
		if n != "" {
			return n
		}
	}
	return c.info.ID
}

// Find looks a container up by its ID or the beginning of it. Without a
// namespace it looks in k8s.io first and then in default. A container of a kind
// that cannot be dumped is an error that says why.
func Find(ctx context.Context, client *containerd.Client, namespace, id string) (*Container, error) {
	if id == "" {
		return nil, errors.New("no container was named")
	}
	look := []string{namespace}
	if namespace == "" {
		look = []string{namespaceKubelet, namespaceUsual}
	}
	for _, ns := range look {
		c, err := findIn(namespaces.WithNamespace(ctx, ns), client, id)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		info, err := c.Info(namespaces.WithNamespace(ctx, ns), containerd.WithoutRefreshedMetadata)
		if err != nil {
			return nil, err
		}
		out := &Container{Namespace: ns, info: info, c: c}
		return out, out.check()
	}
	return nil, fmt.Errorf("no container %s in namespace %s of containerd: name another with --namespace, or look with crictl ps", id, strings.Join(look, " or "))
}

func findIn(ctx context.Context, client *containerd.Client, id string) (containerd.Container, error) {
	if c, err := client.LoadContainer(ctx, id); err == nil || !errdefs.IsNotFound(err) {
		return c, err
	}
	all, err := client.Containers(ctx)
	if err != nil {
		return nil, err
	}
	var found containerd.Container
	for _, c := range all {
		if !strings.HasPrefix(c.ID(), id) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("several containers' IDs begin with %s: give more of it", id)
		}
		found = c
	}
	if found == nil {
		return nil, errdefs.ErrNotFound
	}
	return found, nil
}

// check refuses what cannot be dumped, or not be restored afterwards.
func (c *Container) check() error {
	id := short(c.info.ID)
	if c.info.Labels[labelKind] == "sandbox" {
		return fmt.Errorf("%s is the sandbox of a pod: name one of the pod's containers (crictl ps)", id)
	}
	// Other runtimes of containerd have no CRIU. io.containerd.runc.v2 and
	// those that decorate it do.
	for _, other := range []string{"runsc", "gvisor", "kata", "wasm", "spin", "wasmtime", "urunc"} {
		if strings.Contains(c.info.Runtime.Name, other) {
			return fmt.Errorf("container %s runs under %s: only containers of runc can be checkpointed", id, c.info.Runtime.Name)
		}
	}
	if err := json.Unmarshal(c.info.Spec.GetValue(), &c.spec); err != nil {
		return fmt.Errorf("spec of container %s: %w", id, err)
	}
	if c.spec.Linux == nil {
		return fmt.Errorf("container %s is no Linux container", id)
	}
	own := false
	for _, n := range c.spec.Linux.Namespaces {
		if n.Type == specs.PIDNamespace {
			own = n.Path == ""
		}
	}
	if !own {
		return fmt.Errorf("container %s has no PID namespace of its own, so its PIDs could be taken where it is restored: run it without hostPID and shareProcessNamespace", id)
	}
	return nil
}

// task returns the container's running task.
func (c *Container) task(ctx context.Context) (containerd.Task, error) {
	var s containerd.Status
	t, err := c.c.Task(ctx, nil)
	if err == nil {
		s, err = t.Status(ctx)
	}
	if errdefs.IsNotFound(err) {
		return nil, fmt.Errorf("container %s is not running: only a running container can be checkpointed", short(c.info.ID))
	}
	if err != nil {
		return nil, err
	}
	if s.Status != containerd.Running {
		return nil, fmt.Errorf("container %s is %s: only a running container can be checkpointed", short(c.info.ID), s.Status)
	}
	return t, nil
}

// memory estimates how much CRIU will write, in bytes; 0 if it cannot be told.
func (c *Container) memory(ctx context.Context, t containerd.Task) int64 {
	pids, err := t.Pids(ctx)
	if err != nil {
		return 0
	}
	var total int64
	for _, p := range pids {
		total += dumpable(p.Pid)
	}
	return total
}

// dumpable sums the memory of a process that no file holds.
func dumpable(pid uint32) int64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	defer f.Close()
	var kib int64
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) < 2 {
			continue
		}
		switch fields[0] {
		case "Pss_Anon:", "Pss_Shmem:", "SwapPss:":
			n, err := strconv.ParseInt(fields[1], 10, 64)
			if err == nil {
				kib += n
			}
		}
	}
	return kib << 10
}
