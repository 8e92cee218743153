// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v2"

	"thaw.dev/thaw/snapshotter/config"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/publish/dump"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

var checkpointCommand = &cli.Command{
	Name:      "checkpoint",
	Usage:     "checkpoint a running container and push it to a registry",
	ArgsUsage: "CONTAINER",
	Description: `CONTAINER is the ID of a container of containerd or CRI, or the beginning of it.
The container is frozen while it is dumped to memory. Then it goes on running
with --leave-running; without, it stays frozen until the checkpoint is in the
registry and is stopped then. If the push fails it goes on running.

The reference of what was pushed, with its digest, is printed on standard output.

With --encrypt-for the registry gets memory and state encrypted, and only nodes that
have a key can restore the image. Not encrypted are what describes the checkpoint
(thaw inspect shows it) and what the container wrote to its root filesystem.

Examples:
  thaw checkpoint 3f2a --push registry.example/agents/warm:1
  thaw checkpoint --leave-running --push registry.example/agents/warm:1 $(crictl ps -q --name agent)
  thaw checkpoint -n default --push registry.example/db:warm redis
  thaw checkpoint --encrypt-for jwe:nodes.pub.pem --push registry.example/agents/warm:1 3f2a`,
	Flags: []cli.Flag{
		&cli.StringFlag{Name: "push", Usage: "image `REF` to push to"},
		&cli.BoolFlag{Name: "leave-running", Usage: "let the container go on running"},
		&cli.StringFlag{Name: "dump-dir", Usage: "`FOLDER` on a tmpfs for the dump (default: /run/thaw or /dev/shm)"},
		&cli.StringFlag{Name: "log-dir", Value: "/var/log/thaw", Usage: "`FOLDER` where CRIU's log is kept after a failure"},
		namespaceFlag, addressFlag, baseFlag, reuseFlag, encryptFlag, hostsDirFlag, quietFlag, configFlag,
	},
	OnUsageError: onUsageError,
	Action:       runCheckpoint,
}

func runCheckpoint(c *cli.Context) (err error) {
	args, err := arguments(c, "CONTAINER")
	if err != nil {
		return err
	}
	target := c.String("push")
	if target == "" {
		return usagef("checkpoint: --push REF is missing: see thaw checkpoint --help")
	}
	if _, err := publish.ParseTarget(target); err != nil {
		return usageError{err}
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	if err := useDockerConfig(cfg); err != nil {
		return err
	}
	sealed, err := envelope(c, cfg)
	if err != nil {
		return err
	}
	client, err := connect(c, cfg)
	if err != nil {
		return err
	}
	defer client.Close()
	container, err := dump.Find(c.Context, client, c.String("namespace"), args[0])
	if err != nil {
		return err
	}
	// What would fail afterwards had better fail before anything is frozen.
	if err := publish.CheckTarget(c.Context, target, certsDir(c, cfg)); err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter, c.Bool("quiet"))
	p.step("freezing %s (%s)", container.Name(), container.ID())
	d, err := dump.Take(c.Context, client, container, dump.Options{
		Dir:          c.String("dump-dir"),
		LogDir:       c.String("log-dir"),
		LeaveRunning: c.Bool("leave-running"),
		Base:         c.String("base"),
		CertsDir:     certsDir(c, cfg),
	})
	if err != nil {
		return err
	}
	p.step("dumped in %s", d.Frozen.Round(time.Millisecond))
	result, err := publish.Publish(c.Context, d.Source, publish.Target{
		Reference: target, CertsDir: certsDir(c, cfg), Reuse: c.StringSlice("reuse"), Envelope: sealed, Progress: p.published,
	})
	p.done()
	warnPlain(c, result)
	return finish(c.App.Writer, p, result, err, d.Done(c.Context, err == nil))
}

// envelope makes the key of a checkpoint that is to be encrypted; nil if it is not.
func envelope(c *cli.Context, cfg *config.Config) (*wrap.Envelope, error) {
	recipients := c.StringSlice(encryptFlag.Name)
	if len(recipients) == 0 {
		return nil, nil
	}
	if len(c.StringSlice(reuseFlag.Name)) > 0 {
		return nil, usagef("%s: --reuse does not go with --encrypt-for: an encrypted checkpoint has a key of its own and shares nothing with others", c.Command.Name)
	}
	e, err := wrap.NewEnvelope(c.Context, recipients, cfg.Decryption.KeyproviderConfig)
	if err != nil {
		return nil, fmt.Errorf("--encrypt-for: %w", err)
	}
	return e, nil
}

// warnPlain says what is not encrypted though encryption was asked for.
func warnPlain(c *cli.Context, r *publish.Result) {
	if r != nil && r.Plain > 0 {
		fmt.Fprintf(c.App.ErrWriter, "thaw: what the container wrote to its root filesystem, %s, is not encrypted\n", size(r.Plain))
	}
}

// finish tells how a checkpoint ended. What is in the registry is there, whether
// or not the container could be stopped: its reference is printed in any case.
func finish(w io.Writer, p *progress, result *publish.Result, pushed, done error) error {
	if pushed != nil {
		return errors.Join(pushed, done)
	}
	summarize(p, result)
	fmt.Fprintln(w, result.Reference)
	if done != nil {
		return fmt.Errorf("the checkpoint is pushed, but its container was not cleaned up: %w", done)
	}
	return nil
}

func summarize(p *progress, r *publish.Result) {
	m := r.Config.Memory
	p.step("memory %s, of it %s zero and %s known; %s sent", size(m.Total), size(m.Zero), size(m.Reused), size(r.Uploaded))
}
