// SPDX-License-Identifier: Apache-2.0

// Command thaw makes checkpoint images of containers and shows what a node does
// with them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"

	"github.com/containerd/log"
	"github.com/sirupsen/logrus"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/api"
)

// Exit codes.
const (
	exitFailure = 1
	exitUsage   = 2
)

// version is set by the linker.
var version = ""

// usageError is an error in how the command was called.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errSilent means that everything has been said.
var errSilent = errors.New("")

func main() {
	// A signal cancels what runs; what was frozen or taken is released on the
	// way out, in bounded time. More signals of the kind do not shorten that: a
	// container must not stay frozen because somebody was impatient.
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	code := run(ctx, os.Args, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process around it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	app := newApp(stdout, stderr)
	err := app.RunContext(ctx, reorder(app.Commands, args))
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = errors.New("interrupted")
	}
	if !errors.Is(err, errSilent) {
		fmt.Fprintf(stderr, "thaw: %s\n", api.Line(err.Error()))
	}
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailure
}

func newApp(stdout, stderr io.Writer) *cli.App {
	return &cli.App{
		Name:    "thaw",
		Usage:   "checkpoint containers into registries and restore them without waiting for their memory",
		Version: buildVersion(),
		Description: "A container is checkpointed with 'thaw checkpoint' and restored by a pod that names\n" +
			"the checkpoint image and has runtimeClassName: thaw.\n\n" +
			"Exit status: 0 success, 1 failure, 2 wrong usage.",
		Writer:    stdout,
		ErrWriter: stderr,
		Commands: []*cli.Command{
			checkpointCommand, convertCommand, inspectCommand, checkCommand, psCommand, serveCommand, workingsetCommand, completionCommand,
		},
		EnableBashCompletion: true,
		HideHelpCommand:      true,
		// Names of files and parameters of key providers may have commas in them.
		DisableSliceFlagSeparator: true,
		Suggest:                   true,
		OnUsageError: func(_ *cli.Context, err error, _ bool) error {
			return usageError{err}
		},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usagef("unknown command %q: see thaw --help", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "debug", Usage: "log what is done to standard error", EnvVars: []string{"THAW_DEBUG"}},
		},
		Before: func(c *cli.Context) error {
			logrus.SetOutput(stderr)
			level := logrus.WarnLevel
			if c.Bool("debug") {
				level = logrus.DebugLevel
			}
			logrus.SetLevel(level)
			log.L = logrus.NewEntry(logrus.StandardLogger())
			return nil
		},
		ExitErrHandler: func(*cli.Context, error) {}, // run does it
	}
}

func buildVersion() string {
	if version != "" {
		return version
	}
	if b, ok := debug.ReadBuildInfo(); ok && b.Main.Version != "" {
		return b.Main.Version
	}
	return "unknown"
}

// onUsageError makes flag errors of a command exit with 2.
func onUsageError(_ *cli.Context, err error, _ bool) error { return usageError{err} }

// arguments returns the command's arguments if there are as many as names, and
// an error that names the first one that lacks.
func arguments(c *cli.Context, names ...string) ([]string, error) {
	args := c.Args().Slice()
	if len(args) < len(names) {
		return nil, usagef("%s: %s is missing: see thaw %s --help", c.Command.Name, names[len(args)], c.Command.Name)
	}
	if len(args) > len(names) {
		return nil, usagef("%s: unexpected argument %q: see thaw %s --help", c.Command.Name, args[len(names)], c.Command.Name)
	}
	return args, nil
}
