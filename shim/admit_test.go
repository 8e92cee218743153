// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/snapshotter/api"
)

// strictDaemon admits nothing.
type strictDaemon struct {
	api.NodeService
	asked chan *api.AdmitRequest
}

func (d strictDaemon) Admit(_ context.Context, r *api.AdmitRequest) (*api.AdmitResponse, error) {
	d.asked <- r
	return nil, api.ToStatus(fmt.Errorf("restore of x: file /a is a link: %w", errdefs.ErrFailedPrecondition))
}

// runc is not run for what the daemon refuses in the container's root filesystem.
func TestStartAsksFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "thaw.sock")
	d := strictDaemon{asked: make(chan *api.AdmitRequest, 1)}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterNodeService(server, d)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.WithoutCancel(t.Context()), l) }()
	c := &restored{profiled: make(chan struct{}), filter: []byte("filter"), service: &service{node: newNode(path)}, rootfs: "/bundle/rootfs", prepared: &api.PrepareResponse{RestoreId: "ns/c"}}
	close(c.profiled)
	_, err = c.start(t.Context(), func(context.Context) (*taskapi.StartResponse, error) {
		t.Error("started")
		return nil, errors.New("started")
	})
	if !errdefs.IsFailedPrecondition(err) || err.Error() != "thaw: restore of x: file /a is a link" || c.failure == nil {
		t.Errorf("error %v, failure %v", err, c.failure)
	}
	if r := <-d.asked; r.GetRestoreId() != "ns/c" || r.GetRootfs() != "/bundle/rootfs" || string(r.GetSeccompFilter()) != "filter" {
		t.Errorf("asked %v", r)
	}
	c.service.node.close()
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	<-served
}

func TestRootfsOf(t *testing.T) {
	for in, want := range map[string]string{"rootfs": "/bundle/rootfs", "/elsewhere": "/elsewhere", "": ""} {
		got, err := rootfsOf("/bundle", &specs.Spec{Root: &specs.Root{Path: in}})
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q is at %q, %v", in, got, err)
		}
	}
	if _, err := rootfsOf("/bundle", &specs.Spec{}); err == nil {
		t.Error("no root is no error")
	}
}
