// SPDX-License-Identifier: Apache-2.0

// Command thaw-snapshotter is thaw's node daemon; see package snapshotter.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter"
	"thaw.dev/thaw/snapshotter/config"
)

// version is set by the linker.
var version = ""

// gcPercent is by how much the daemon's memory may grow until garbage is collected. What it keeps is small; a restore makes a few
// megabytes of garbage and should not have to wait for its collection.
const gcPercent = 400

func main() {
	path := flag.String("config", "", "configuration `file` (default "+config.DefaultPath+" if there is one)")
	show := flag.Bool("version", false, "print the version and exit")
	flag.Parse()
	if *show {
		fmt.Println("thaw-snapshotter", versionText())
		return
	}
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "thaw-snapshotter: unexpected argument %q: see -help\n", flag.Arg(0))
		os.Exit(2)
	}
	if err := run(*path); err != nil {
		fmt.Fprintf(os.Stderr, "thaw-snapshotter: %v\n", err)
		os.Exit(1)
	}
}

func run(path string) error {
	cfg, err := config.Load(path)
	if err != nil {
		return err
	}
	if err := log.SetLevel(cfg.LogLevel); err != nil {
		return fmt.Errorf("log_level: %w", err)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	return snapshotter.Run(ctx, cfg, nil)
}

func versionText() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
