// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/urfave/cli/v2"

	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/publish/archive"
)

var convertCommand = &cli.Command{
	Name:      "convert",
	Usage:     "push an archive of the kubelet's checkpoint API as a checkpoint image",
	ArgsUsage: "ARCHIVE REF",
	Description: `ARCHIVE is what the kubelet's checkpoint API or 'crictl checkpoint' wrote: a tar
archive, plain or compressed by gzip or zstd. The base image is the one that the
archive names; it must be in a registry. For --encrypt-for see thaw checkpoint.

Examples:
  thaw convert /var/lib/kubelet/checkpoints/checkpoint-agent-2026.tar registry.example/agents/warm:1
  thaw convert --base registry.example/agent:7 checkpoint.tar.gz registry.example/agents/warm:1`,
	Flags: []cli.Flag{
		&cli.StringFlag{Name: "temp-dir", Usage: "`FOLDER` to unpack the archive in (default: TMPDIR or /tmp)"},
		baseFlag, reuseFlag, encryptFlag, hostsDirFlag, quietFlag, configFlag,
	},
	OnUsageError: onUsageError,
	Action:       runConvert,
}

func runConvert(c *cli.Context) (err error) {
	args, err := arguments(c, "ARCHIVE", "REF")
	if err != nil {
		return err
	}
	if _, err := publish.ParseTarget(args[1]); err != nil {
		return usageError{err}
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	if err := useDockerConfig(cfg); err != nil {
		return err
	}
	if _, err := os.Stat(args[0]); err != nil {
		return err
	}
	sealed, err := envelope(c, cfg)
	if err != nil {
		return err
	}
	if err := publish.CheckTarget(c.Context, args[1], certsDir(c, cfg)); err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter, c.Bool("quiet"))
	p.step("reading %s", args[0])
	a, err := archive.Open(c.Context, args[0], archive.Options{TempDir: c.String("temp-dir"), Base: c.String("base"), CertsDir: certsDir(c, cfg)})
	if err != nil {
		return err
	}
	result, err := publish.Publish(c.Context, a.Source, publish.Target{
		Reference: args[1], CertsDir: certsDir(c, cfg), Reuse: c.StringSlice("reuse"), Envelope: sealed, Progress: p.published,
	})
	p.done()
	if err := errors.Join(err, a.Close()); err != nil {
		return err
	}
	summarize(p, result)
	warnPlain(c, result)
	fmt.Fprintln(c.App.Writer, result.Reference)
	return nil
}
