// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/log"

	"thaw.dev/thaw/snapshotter/api"
)

// Name is the runtime's name in containerd's config (runtime_type).
const Name = "io.containerd.thaw.v1"

// NewManager returns what starts, describes and cleans up after shims: runc's
// manager, to which only the form of the options is translated.
func NewManager() shim.Shim { return runcManager{manager.NewShimManager(Name)} }

type runcManager struct{ shim.Shim }

func (m runcManager) Start(ctx context.Context, params *bootapi.BootstrapParams) (*bootapi.BootstrapResult, error) {
	for _, ext := range params.GetExtensions() {
		v, err := convertOptions(ext.GetValue())
		if err != nil {
			return nil, err
		}
		ext.Value = v
	}
	return m.Shim.Start(ctx, params)
}

func (m runcManager) Info(ctx context.Context, options io.Reader) (*types.RuntimeInfo, error) {
	converted, err := convertOptionsStream(options)
	if err != nil {
		return nil, err
	}
	return m.Shim.Info(ctx, converted)
}

// Stop runs in a process of its own after a shim has died or could not be
// reached. The container was killed by then if memory was missing; here the restore is
// ended so that nothing of it stays on the node.
func (m runcManager) Stop(ctx context.Context, id string) (shim.StopStatus, error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return shim.StopStatus{}, err
	}
	cwd, err := os.Getwd() // containerd starts this in the folder of some bundle
	if err != nil {
		return shim.StopStatus{}, err
	}
	bundle := filepath.Join(filepath.Dir(cwd), id)
	options, err := runc.ReadOptions(bundle)
	if err != nil {
		return shim.StopStatus{}, err
	}
	if err := removeCRIURoot(criuRoot(options, ns, id)); err != nil {
		return shim.StopStatus{}, err
	}
	status, err := m.Shim.Stop(ctx, id)
	if scratch := scratchDir(nodeAddress(), ns, id); exists(scratch) {
		if rmErr := errors.Join(cleanCgroups(bundle, options), removeScratch(scratch)); rmErr != nil {
			log.G(ctx).WithError(rmErr).Warn("clean up after a restore")
		}
	}
	n := newNode(nodeAddress())
	defer n.close()
	if relErr := n.call(ctx, func(ctx context.Context, c api.NodeService) error {
		_, err := c.Release(ctx, &api.ReleaseRequest{RestoreId: restoreID(ns, id)})
		return err
	}); relErr != nil {
		// Every container of this runtime comes here, most were never restored,
		// and a daemon that is down forgets its restores by itself.
		log.G(ctx).WithError(relErr).Debug("restore not released")
	}
	return status, err
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// cleanCgroups removes the cgroups of a container whose restore a killed shim had begun.
func cleanCgroups(bundle string, options *runcoptions.Options) error {
	spec, err := readSpec(bundle)
	if err != nil {
		return err
	}
	path, err := cgroupPath(spec, options.GetSystemdCgroup())
	if err != nil {
		return err
	}
	return removeCgroups(path)
}
