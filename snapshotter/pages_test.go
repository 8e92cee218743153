// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"net"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
)

// serve asks a daemon to serve pages, and returns what came of it.
func serve(t *testing.T, cfg *config.Config, req *api.ServeRequest) error {
	t.Helper()
	conn, err := net.Dial("unix", cfg.Socket())
	if err != nil {
		t.Fatal(err)
	}
	c := ttrpc.NewClient(conn)
	defer c.Close()
	stream, err := api.NewPagesClient(c).Serve(t.Context(), req)
	if err == nil {
		_, err = stream.Recv()
	}
	return errgrpc.ToNative(err)
}

func TestPages(t *testing.T) {
	cfg := testConfig(t)
	stop := run(t, cfg)
	if err := serve(t, cfg, &api.ServeRequest{}); !errdefs.IsNotImplemented(err) {
		t.Errorf("not enabled: %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	cfg.PageServer.Enable = true
	cfg.Registry.CertsDir = t.TempDir()
	stop = run(t, cfg)
	d := digest.FromString("manifest").String()
	for name, req := range map[string]*api.ServeRequest{
		"nothing":     {},
		"no digest":   {Image: "r.test/x:1", Digest: "latest", Size: 10},
		"sha512":      {Image: "r.test/x:1", Digest: digest.SHA512.FromString("manifest").String(), Size: 10},
		"no size":     {Image: "r.test/x:1", Digest: d},
		"size":        {Image: "r.test/x:1", Digest: d, Size: 1 << 40},
		"port":        {Image: "r.test/x:1", Digest: d, Size: 10, Port: 70000},
		"no image":    {Digest: d, Size: 10},
		"image's own": {Image: "x", Digest: d, Size: 10},
	} {
		if err := serve(t, cfg, req); !errdefs.IsInvalidArgument(err) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}
