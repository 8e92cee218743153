// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// startTimeout bounds the wait for one server's readiness on a loaded machine.
const startTimeout = time.Minute

// containerdConfig is what a cluster admin would write, apart from the folders and restrict_oom_score_adj.
var containerdConfig = template.Must(template.New("containerd").Parse(`version = 3
root = "{{.Dir}}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{{.Socket}}"
[proxy_plugins.thaw]
  type = "snapshot"
  address = "{{.SnapshotterSocket}}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  # The transfer service would need an unpack rule for each snapshotter that a handler names.
  use_local_image_pull = true
  # Lazy snapshotters learn what to fetch from annotations of the snapshots.
  disable_snapshot_annotations = false
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{{.Pause}}"
  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = "/etc/containerd/certs.d"
[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE nobody may lower an OOM score.
  restrict_oom_score_adj = {{.RestrictOOMScoreAdj}}
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      snapshotter = "{{.Snapshotter}}"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.thaw]
      runtime_type = "io.containerd.thaw.v1"
      snapshotter = "{{.Snapshotter}}"
      pod_annotations = ["thaw.dev/*"]
      container_annotations = ["thaw.dev/*"]
`))

// network is a bridge in the stack's network namespace from which all pods can be reached.
const network = `{
  "cniVersion": "0.4.0", "name": "stack",
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "ipam": {
      "type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": "10.88.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "loopback"}
  ]
}
`

const hosts = `server = "http://%[1]s"
[host."http://%[1]s"]
  capabilities = ["pull", "resolve"]
`

// crictlConfig has a timeout in seconds that allows for pulls and checkpoints; crictl's own is two.
const crictlConfig = `runtime-endpoint: unix://%[1]s
image-endpoint: unix://%[1]s
timeout: 120
`

const daemonConfig = `# Written by the test stack.
cache_dir = %q
[containerd]
  address = %q
`

// StartContainerd starts containerd on the stack's state, as at a first start or after StopContainerd or a kill, and
// returns when CRI and its network are ready.
func (s *Stack) StartContainerd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s.progress("containerd")
	var config strings.Builder
	err := containerdConfig.Execute(&config, map[string]any{
		"Dir": s.Dir, "Socket": ContainerdSocket, "SnapshotterSocket": SnapshotterSocket, "Pause": s.Registry.Ref(pauseImage),
		"Snapshotter": s.options.Snapshotter, "RestrictOOMScoreAdj": !hasCapability(unix.CAP_SYS_RESOURCE),
	})
	if err != nil {
		return err
	}
	for path, content := range map[string]string{
		"/etc/containerd/config.toml":                                  config.String(),
		"/etc/containerd/certs.d/" + s.Registry.Addr() + "/hosts.toml": fmt.Sprintf(hosts, s.Registry.Addr()),
		"/etc/cni/net.d/10-stack.conflist":                             network,
		"/etc/crictl.yaml":                                             fmt.Sprintf(crictlConfig, ContainerdSocket),
	} {
		if err := writeFile(path, content); err != nil {
			return err
		}
	}
	if s.containerd, err = startProcess(ctx, filepath.Join(s.Logs(), "containerd.log"), filepath.Join(s.Bin, "containerd")); err != nil {
		return err
	}
	return s.connect(ctx)
}

// connect makes the clients and waits until CRI says that it is ready.
func (s *Stack) connect(ctx context.Context) (err error) {
	if s.conn != nil {
		return nil // gRPC connects again by itself
	}
	s.conn, err = grpc.NewClient("unix://"+ContainerdSocket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(16<<20)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second}}))
	if err != nil {
		return err
	}
	s.runtime, s.images = cri.NewRuntimeServiceClient(s.conn), cri.NewImageServiceClient(s.conn)
	// A connection of its own, because only such a client adds the namespace to each call.
	if s.client, err = containerd.New(ContainerdSocket, containerd.WithDefaultNamespace(CRINamespace)); err != nil {
		return err
	}
	status, err := s.runtime.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return fmt.Errorf("CRI: %w", err)
	}
	for _, c := range status.GetStatus().GetConditions() {
		if !c.GetStatus() && (c.GetType() == cri.RuntimeReady || c.GetType() == cri.NetworkReady) {
			return fmt.Errorf("CRI: %s is false: %s", c.GetType(), c.GetMessage())
		}
	}
	return nil
}

// StopContainerd stops containerd in order. Containers run on, as they do on a node.
func (s *Stack) StopContainerd(ctx context.Context) error {
	err := s.containerd.Stop(ctx)
	if s.client != nil {
		err = errors.Join(err, s.client.Close())
	}
	if s.conn != nil {
		err = errors.Join(err, s.conn.Close())
	}
	s.conn, s.client, s.runtime, s.images = nil, nil, nil, nil
	return err
}

// ContainerdProcess gives containerd's process, nil while there is none.
func (s *Stack) ContainerdProcess() *Process { return s.containerd }

// HasDaemon says whether thaw-snapshotter was built.
func (s *Stack) HasDaemon() bool { return s.has("thaw-snapshotter") }

// HasShim says whether thaw's shim was built, and so whether the handler thaw can work.
func (s *Stack) HasShim() bool { return s.has("containerd-shim-thaw-v1") }

func (s *Stack) has(name string) bool {
	_, err := os.Stat(filepath.Join(s.Bin, name))
	return err == nil
}

// StartDaemon starts thaw-snapshotter on the stack's state, as at a first start or after StopDaemon or a kill, and returns
// when it has said that it is ready.
func (s *Stack) StartDaemon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s.progress("thaw-snapshotter")
	config := fmt.Sprintf(daemonConfig, s.ThawCache(), ContainerdSocket) + s.options.DaemonConfig
	if err := writeFile("/etc/thaw/config.toml", config); err != nil {
		return err
	}
	var err error
	s.daemon, err = startProcess(ctx, filepath.Join(s.Logs(), "thaw-snapshotter.log"), filepath.Join(s.Bin, "thaw-snapshotter"))
	return err
}

// StopDaemon stops thaw-snapshotter in order.
func (s *Stack) StopDaemon(ctx context.Context) error { return s.daemon.Stop(ctx) }

// RestartDaemon stops thaw-snapshotter and starts it with other additions to its configuration (TOML); restored containers
// live on.
func (s *Stack) RestartDaemon(ctx context.Context, config string) error {
	if err := s.StopDaemon(ctx); err != nil {
		return err
	}
	s.options.DaemonConfig = config
	return s.StartDaemon(ctx)
}

// Daemon gives the daemon's process, nil while there is none.
func (s *Stack) Daemon() *Process { return s.daemon }

// ThawCache is the daemon's cache_dir.
func (s *Stack) ThawCache() string { return filepath.Join(s.Dir, "thaw") }

// ClearThawCache makes the node's cache cold: it stops the daemon, empties its cache but for the folders to keep, and starts
// it again. Restored containers must be gone.
func (s *Stack) ClearThawCache(ctx context.Context, keep ...string) error {
	running := s.daemon.Running()
	if err := s.StopDaemon(ctx); err != nil {
		return err
	}
	folders, err := os.ReadDir(s.ThawCache())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, f := range folders {
		if slices.Contains(keep, f.Name()) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(s.ThawCache(), f.Name())); err != nil {
			return err
		}
	}
	if !running {
		return nil
	}
	return s.StartDaemon(ctx)
}

// hasCapability says whether the process has a capability.
func hasCapability(number uint) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false
	}
	return data[number/32].Effective&(1<<(number%32)) != 0
}

func writeFile(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o644)
}
