// SPDX-License-Identifier: Apache-2.0

// Package shim is the runtime io.containerd.thaw.v1: containerd's task service
// for runc, around which a few calls are decorated so that a container whose
// image holds a checkpoint is restored from it.
//
//	Create      decides; prepares the restore (the daemon resolves and checks)
//	Start       has the daemon check again, now in the root filesystem; runs `runc restore`
//	            while the fault handler fills pages
//	Stats       reads the cgroup, which runc's service does not know of a restored container
//	Checkpoint  completes a restored container's memory first
//	Delete      ends the fault handler once the container is gone
//
// All else, and every container without a checkpoint, goes straight through to
// containerd's own code, none of which is copied here.
package shim

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"sync"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/task"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/log"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/spans"
)

// Annotations that CRI puts into a container's spec
// (containerd internal/cri/annotations).
const (
	criContainerType = "io.kubernetes.cri.container-type"
	criSandbox       = "sandbox"
)

const (
	specFile = "config.json" // in a bundle
	// maxSpec bounds it in bytes.
	maxSpec = 16 << 20
)

// readSpec reads the spec in a bundle. (containerd's package oci would do it, and
// bring images, archives and their compression into every shim.)
func readSpec(bundle string) (*specs.Spec, error) {
	p, err := readBounded(filepath.Join(bundle, specFile), maxSpec)
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{}
	return spec, json.Unmarshal(p, spec)
}

// Register makes the task service known to containerd's shim framework.
func Register() {
	n := newNode(nodeAddress())
	if spans.Configured() {
		registerTracing(n)
	}
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn: func(ic *plugin.InitContext) (any, error) {
			pp, err := ic.GetByID(plugins.EventPlugin, "publisher")
			if err != nil {
				return nil, err
			}
			ss, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
			if err != nil {
				return nil, err
			}
			runc, err := task.NewTaskService(ic.Context, pp.(shim.Publisher), ss.(shutdown.Service))
			if err != nil {
				return nil, err
			}
			s := &service{
				TTRPCTaskService: runc,
				node:             n,
				accounting:       accounting{ctx: ic.Context, publisher: pp.(shim.Publisher)},
				restored:         make(map[string]*restored),
			}
			ss.(shutdown.Service).RegisterCallback(s.shutdown)
			return s, nil
		},
	})
}

type service struct {
	taskapi.TTRPCTaskService // runc's; what is not decorated goes there
	node                     *node
	accounting               accounting
	collector                collector

	mu       sync.Mutex
	restored map[string]*restored // by container ID; guarded by mu
}

var _ shim.TTRPCServerUnaryOptioner = (*service)(nil)

// RegisterTTRPC puts the decorated service in the place of runc's.
func (s *service) RegisterTTRPC(server *ttrpc.Server) error {
	taskapi.RegisterTTRPCTaskService(server, s)
	return nil
}

// UnaryServerInterceptor is runc's, which hands the trace context to runc.
func (s *service) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	if o, ok := s.TTRPCTaskService.(shim.TTRPCServerUnaryOptioner); ok {
		return o.UnaryServerInterceptor()
	}
	return func(ctx context.Context, unmarshal ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		return method(ctx, unmarshal)
	}
}

// Create makes the container, or prepares its restore.
func (s *service) Create(ctx context.Context, r *taskapi.CreateTaskRequest) (*taskapi.CreateTaskResponse, error) {
	options, err := convertOptions(r.Options)
	if err != nil {
		return nil, api.ToStatus(err)
	}
	r.Options = options
	if r.Checkpoint != "" {
		// The caller brings CRIU images of its own, as under runc.
		return s.TTRPCTaskService.Create(ctx, r)
	}
	spec, err := readSpec(r.Bundle)
	if err != nil {
		return nil, api.ToStatus(fmt.Errorf("read the container's spec: %w", err))
	}
	if spec.Annotations[criContainerType] == criSandbox {
		return s.TTRPCTaskService.Create(ctx, r)
	}
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, api.ToStatus(err)
	}
	var prepared *api.PrepareResponse
	err = s.node.call(ctx, func(ctx context.Context, c api.NodeService) (err error) {
		prepared, err = c.Prepare(ctx, &api.PrepareRequest{Namespace: ns, ContainerId: r.ID, Bundle: r.Bundle})
		return err
	})
	if err != nil {
		s.release(ctx, restoreID(ns, r.ID)) // the answer may have been lost
		return nil, api.ToStatus(fmt.Errorf("thaw: %w", err))
	}
	if !prepared.GetRestore() {
		return s.TTRPCTaskService.Create(ctx, r)
	}
	runcOptions, err := unmarshalRuncOptions(options)
	if err != nil {
		s.release(ctx, prepared.GetRestoreId())
		return nil, api.ToStatus(err)
	}
	c, err := newRestored(ctx, s, ns, r, spec, runcOptions, prepared)
	if err != nil {
		return nil, api.ToStatus(fmt.Errorf("thaw: prepare restore of %s: %w", prepared.GetImage(), err))
	}
	r.Checkpoint = prepared.GetImagesDir()
	resp, err := s.createTask(ctx, r)
	if err != nil {
		c.close(ctx)
		return nil, err
	}
	s.mu.Lock()
	s.restored[r.ID] = c
	s.mu.Unlock()
	return resp, nil
}

// createTask lets runc's task service create a container that is to be restored:
// it mounts the root filesystem and opens the streams.
func (s *service) createTask(ctx context.Context, r *taskapi.CreateTaskRequest) (*taskapi.CreateTaskResponse, error) {
	ctx, span := startSpan(ctx, "CreateTask")
	defer span.End()
	return s.TTRPCTaskService.Create(ctx, r)
}

// release ends a restore in the daemon, also when the caller has given up.
func (s *service) release(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	err := s.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
		_, err := n.Release(ctx, &api.ReleaseRequest{RestoreId: id})
		return err
	})
	if err != nil {
		// The daemon ends the restores of containers that are gone by itself.
		log.G(ctx).WithError(err).Warn("thaw: release restore")
	}
}

// Start starts a process; a container that was prepared for it is restored.
func (s *service) Start(ctx context.Context, r *taskapi.StartRequest) (*taskapi.StartResponse, error) {
	c := s.lookup(r.ID)
	if c == nil || r.ExecID != "" {
		return s.TTRPCTaskService.Start(ctx, r)
	}
	resp, err := c.start(ctx, func(ctx context.Context) (*taskapi.StartResponse, error) {
		return s.TTRPCTaskService.Start(ctx, r)
	})
	if err != nil {
		return nil, api.ToStatus(err)
	}
	return resp, nil
}

// Stats returns the statistics of a container's cgroup.
func (s *service) Stats(ctx context.Context, r *taskapi.StatsRequest) (*taskapi.StatsResponse, error) {
	c := s.lookup(r.ID)
	if c == nil {
		return s.TTRPCTaskService.Stats(ctx, r)
	}
	resp, err := stats(c.cgroup())
	if err != nil {
		return nil, api.ToStatus(err)
	}
	return resp, nil
}

// Checkpoint dumps a container. Its connections and file locks are part of what
// a checkpoint is for, and kubelet has no way to ask for them, so a dump of a
// container of this runtime needs no flag for either.
func (s *service) Checkpoint(ctx context.Context, r *taskapi.CheckpointTaskRequest) (*emptypb.Empty, error) {
	opts := &runcoptions.CheckpointOptions{}
	if r.Options != nil {
		if err := typeurl.UnmarshalTo(r.Options, opts); err != nil {
			return nil, api.ToStatus(err)
		}
	}
	opts.OpenTcp, opts.FileLocks, opts.ExternalUnixSockets = true, true, true
	options, err := typeurl.MarshalAnyToProto(opts)
	if err != nil {
		return nil, api.ToStatus(err)
	}
	r.Options = options
	if c := s.lookup(r.ID); c != nil {
		if err := c.complete(ctx); err != nil {
			return nil, api.ToStatus(fmt.Errorf("thaw: checkpoint of a restored container: %w", err))
		}
	}
	return s.TTRPCTaskService.Checkpoint(ctx, r)
}

// Delete removes a process; with a restored container's first process its fault
// handler ends.
func (s *service) Delete(ctx context.Context, r *taskapi.DeleteRequest) (*taskapi.DeleteResponse, error) {
	resp, err := s.TTRPCTaskService.Delete(ctx, r)
	if err != nil || r.ExecID != "" {
		return resp, err
	}
	s.mu.Lock()
	c := s.restored[r.ID]
	delete(s.restored, r.ID)
	s.mu.Unlock()
	if c != nil {
		c.close(ctx)
	}
	return resp, nil
}

func (s *service) lookup(id string) *restored {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.restored[id]
}

// shutdown is called once when the shim ends in good order.
func (s *service) shutdown(ctx context.Context) error {
	s.mu.Lock()
	all := s.restored
	s.restored = make(map[string]*restored)
	s.mu.Unlock()
	for _, c := range all {
		c.close(ctx)
	}
	s.node.close()
	return nil
}

func unmarshalRuncOptions(in *anypb.Any) (*runcoptions.Options, error) {
	opts := &runcoptions.Options{}
	if in.GetValue() == nil {
		return opts, nil
	}
	if err := typeurl.UnmarshalTo(in, opts); err != nil {
		return nil, fmt.Errorf("runtime options: %w", err)
	}
	return opts, nil
}
