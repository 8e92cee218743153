// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v2"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/workingset"
)

var workingsetCommand = &cli.Command{
	Name:  "workingset",
	Usage: "record and publish what restored containers touch first",
	Description: `A node records which memory a restored container touches until it is quiet, and
fetches that first when the image is restored again.`,
	Subcommands:     []*cli.Command{workingsetRecordCommand, workingsetPushCommand},
	HideHelpCommand: true,
	OnUsageError:    onUsageError,
	Action: func(c *cli.Context) error {
		if c.Args().Present() {
			return usagef("unknown command %q: see thaw workingset --help", c.Args().First())
		}
		return cli.ShowSubcommandHelp(c)
	},
}

var workingsetPushCommand = &cli.Command{
	Name:      "push",
	Usage:     "publish the working set that this node recorded of an image",
	ArgsUsage: "REF",
	Description: `It is pushed beside the image, whose digest does not change, and used by nodes that
have restored the image never before. The newest one counts. A recording is over
when the container has touched nothing new for a while, after a minute at most.

The reference of what was pushed is printed on standard output.

Examples:
  thaw workingset push registry.example/agents/warm:1`,
	Flags:        []cli.Flag{hostsDirFlag, socketFlag, configFlag},
	OnUsageError: onUsageError,
	Action:       runWorkingsetPush,
}

func runWorkingsetPush(c *cli.Context) error {
	args, err := arguments(c, "REF")
	if err != nil {
		return err
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	if err := useDockerConfig(cfg); err != nil {
		return err
	}
	ref, err := pushWorkingSet(c.Context, args[0], daemonSocket(c, cfg), certsDir(c, cfg))
	if err != nil {
		return fmt.Errorf("workingset push: %w", err)
	}
	_, err = fmt.Fprintln(c.App.Writer, ref)
	return err
}

func pushWorkingSet(ctx context.Context, ref, socket, certs string) (string, error) {
	img, err := publish.Read(ctx, ref, certs)
	if err != nil {
		return "", err
	}
	var recorded *api.WorkingSetResponse
	err = ask(ctx, socket, func(ctx context.Context, n api.NodeService) (err error) {
		recorded, err = n.WorkingSet(ctx, &api.WorkingSetRequest{Digest: img.Checkpoint.Manifest.Digest.String()})
		return err
	})
	if errdefs.IsNotFound(err) {
		return "", fmt.Errorf("this node has recorded no working set of %s: restore it here once, use it as a client would, and try again when it has been quiet for 15 s", ref)
	}
	if err != nil {
		return "", err
	}
	set, err := workingset.Parse(recorded.GetWorkingSet())
	if err != nil {
		return "", err
	}
	return publish.PushWorkingSet(ctx, img, set, certs)
}
