// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/ttrpc"

	"thaw.dev/thaw/snapshotter/api"
)

// slowDaemon prepares for so long that its caller gives up.
type slowDaemon struct {
	api.NodeService
	asked    chan struct{}
	released chan string
}

func (d slowDaemon) Prepare(context.Context, *api.PrepareRequest) (*api.PrepareResponse, error) {
	close(d.asked)
	<-d.released
	return &api.PrepareResponse{Restore: true}, nil
}

func (d slowDaemon) Release(_ context.Context, r *api.ReleaseRequest) (*api.ReleaseResponse, error) {
	d.released <- r.GetRestoreId()
	d.released <- r.GetRestoreId()
	return &api.ReleaseResponse{}, nil
}

// TestCancelledCreateReleases: nobody else would end a restore whose preparation was not waited for.
func TestCancelledCreateReleases(t *testing.T) {
	path := filepath.Join(t.TempDir(), "thaw.sock")
	d := slowDaemon{asked: make(chan struct{}), released: make(chan string, 2)}
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
	bundle := t.TempDir()
	if err := os.WriteFile(filepath.Join(bundle, specFile), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &service{node: newNode(path)}
	defer s.node.close()
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(t.Context(), "ns"))
	go func() {
		<-d.asked
		cancel()
	}()
	if _, err := s.Create(ctx, &taskapi.CreateTaskRequest{ID: "c", Bundle: bundle}); err == nil {
		t.Error("created by a daemon that did not answer")
	}
	select {
	case id := <-d.released:
		if id != "ns/c" {
			t.Errorf("released %q", id)
		}
	default:
		t.Error("the restore was not released")
		d.released <- ""
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	<-served
}
