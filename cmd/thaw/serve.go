// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/urfave/cli/v2"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/publish"
)

var serveCommand = &cli.Command{
	Name:      "serve",
	Usage:     "serve a checkpoint's memory to CRIU's own lazy-pages daemon",
	ArgsUsage: "REF",
	Description: `The node's daemon lays out the checkpoint without its lazy pages and serves these by
CRIU's page-server protocol, until this command is interrupted. Folder and address
are printed, and the commands of CRIU that restore from them. End those that still
miss pages first: CRIU lets them run on with zeros.

The daemon does so only with page_server.enable = true in its configuration.

Examples:
  thaw serve registry.example/agents/warm:1
  thaw serve --port 9472 --json registry.example/agents/warm:1`,
	Flags: []cli.Flag{
		&cli.UintFlag{Name: "port", Usage: "`PORT` to serve on (default: a free one)"},
		jsonFlag, socketFlag, hostsDirFlag, configFlag,
	},
	OnUsageError: onUsageError,
	Action:       runServe,
}

// served is the JSON of thaw serve.
type served struct {
	Image     string `json:"image"`
	ImagesDir string `json:"imagesDir"`
	Address   string `json:"address"`
	Port      string `json:"port"`
}

func runServe(c *cli.Context) error {
	args, err := arguments(c, "REF")
	if err != nil {
		return err
	}
	if c.Uint("port") > 65535 {
		return usagef("serve: no port %d: use one from 1 to 65535", c.Uint("port"))
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	if err := useDockerConfig(cfg); err != nil {
		return err
	}
	img, err := publish.Read(c.Context, args[0], certsDir(c, cfg))
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	manifest := img.Checkpoint.Manifest
	return servePages(c.Context, daemonSocket(c, cfg), &api.ServeRequest{
		Image: img.Reference, Digest: manifest.Digest.String(), Size: manifest.Size, Port: uint32(c.Uint("port")),
	}, func(s *served) error {
		if c.Bool("json") {
			return printJSON(c.App.Writer, s)
		}
		return s.print(c.App.Writer)
	})
}

// servePages has the daemon serve until the context ends, which is no error. ready is
// called once it does.
func servePages(ctx context.Context, socket string, req *api.ServeRequest, ready func(*served) error) error {
	client, err := dialDaemon(ctx, socket)
	if err != nil {
		return err
	}
	// The end of the connection is the end of the call.
	defer client.Close()
	stop := context.AfterFunc(ctx, func() { client.Close() })
	defer stop()
	begun := false
	err = func() error {
		stream, err := api.NewPagesClient(client).Serve(ctx, req)
		if err != nil {
			return err
		}
		for {
			resp, err := stream.Recv()
			if err != nil {
				return err
			}
			host, port, err := net.SplitHostPort(resp.GetAddress())
			if err != nil {
				return err
			}
			begun = true
			if err := ready(&served{Image: req.GetImage(), ImagesDir: resp.GetImagesDir(), Address: host, Port: port}); err != nil {
				return err
			}
		}
	}()
	native := errgrpc.ToNative(err)
	switch {
	case ctx.Err() != nil && begun:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errdefs.IsNotImplemented(native):
		return fmt.Errorf("thaw-snapshotter at %s serves no pages: set page_server.enable = true in its configuration and restart it", socket)
	case errors.Is(err, io.EOF):
		return fmt.Errorf("thaw-snapshotter at %s ended the page server", socket)
	}
	return fmt.Errorf("thaw-snapshotter at %s: %w", socket, native)
}

func (s *served) print(out io.Writer) error {
	_, err := fmt.Fprintf(out, `images  %s
pages   %s port %s

To restore, with an empty folder WORK and the options that the dump had:
  criu lazy-pages -D %[1]s -W WORK --page-server --address %[2]s --port %[3]s &
  criu restore -D %[1]s -W WORK --lazy-pages
`, s.ImagesDir, s.Address, s.Port)
	return err
}
