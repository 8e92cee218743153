// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
)

// Names by which containerd knows thaw.
const (
	thawRuntime = "io.containerd.thaw.v1"
	thawHandler = "thaw"
	thawShim    = "containerd-shim-thaw-v1"
)

// toolTimeout bounds each question to another program.
const toolTimeout = 10 * time.Second

var checkCommand = &cli.Command{
	Name:  "check",
	Usage: "say whether this node can restore checkpoints, and what it lacks",
	Description: `Looks at the kernel, CRIU, runc, containerd with its handler thaw, the node's
daemon and the folders that it uses. Exit status 1 if anything is missing.

Examples:
  thaw check
  thaw check --json | jq '.[] | select(.ok | not)'`,
	Flags:        []cli.Flag{jsonFlag, addressFlag, socketFlag, configFlag},
	OnUsageError: onUsageError,
	Action:       runCheck,
}

// finding is the JSON of one check.
type finding struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

func found(name, format string, args ...any) finding {
	return finding{Name: name, OK: true, Detail: fmt.Sprintf(format, args...)}
}

func missing(name string, why error, remedy string) finding {
	return finding{Name: name, Detail: api.Line(why.Error()), Remedy: remedy}
}

func runCheck(c *cli.Context) error {
	if _, err := arguments(c); err != nil {
		return err
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	var all []finding
	for _, f := range criu.CheckHost(c.Context, cfg.CRIU.Path) {
		all = append(all, finding(f))
	}
	all = append(all, checkRunc(c.Context))
	all = append(all, checkContainerd(c, cfg)...)
	all = append(all, checkDaemon(c.Context, daemonSocket(c, cfg)), checkCache(cfg.CacheDir), checkState(cfg.StateDir))
	if c.Bool("json") {
		err = printJSON(c.App.Writer, all)
	} else {
		err = printFindings(c.App.Writer, all)
	}
	if err != nil {
		return err
	}
	for _, f := range all {
		if !f.OK {
			return errSilent
		}
	}
	return nil
}

func printFindings(out io.Writer, all []finding) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range all {
		mark, text := "ok", f.Detail
		if !f.OK {
			mark = "MISSING"
			if f.Remedy != "" {
				text += ": " + f.Remedy
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", mark, f.Name, text)
	}
	return w.Flush()
}

// checkRunc asks runc whether it was built with checkpoint support.
func checkRunc(ctx context.Context) finding {
	const name = "runc"
	path, err := exec.LookPath("runc")
	if err != nil {
		return missing(name, err, "install runc 1.3 or later")
	}
	ctx, cancel := context.WithTimeout(ctx, toolTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "features").Output()
	if err != nil {
		return missing(name, fmt.Errorf("%s features: %w", path, err), "install runc 1.3 or later")
	}
	var features struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(out, &features); err != nil {
		return missing(name, err, "install runc 1.3 or later")
	}
	version := features.Annotations["org.opencontainers.runc.version"]
	if features.Annotations["org.opencontainers.runc.checkpoint.enabled"] != "true" {
		return missing(name, fmt.Errorf("%s %s has no checkpoint support", path, version), "install a runc that has")
	}
	return found(name, "%s at %s", version, path)
}

// checkContainerd looks at containerd, the shim as containerd finds it, and the
// handler in CRI's configuration.
func checkContainerd(c *cli.Context, cfg *config.Config) []finding {
	client, err := connect(c, cfg)
	if err != nil {
		return []finding{missing("containerd", err, "")}
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(c.Context, namespaces.Default), toolTimeout)
	defer cancel()
	v, err := client.Version(ctx)
	if err != nil {
		return []finding{missing("containerd", err, "start containerd")}
	}
	return []finding{found("containerd", "%s", v.Version), checkShim(ctx, client), checkRuncsCRIU(ctx, client, cfg.CRIU.Path), checkHandler(ctx, client)}
}

// checkRuncsCRIU looks for the criu that runc runs: it is the one on the PATH of
// containerd, whatever the daemon checks.
func checkRuncsCRIU(ctx context.Context, client *containerd.Client, checked string) finding {
	const name, remedy = "criu of runc", "set criu.path in thaw's configuration to the file that runc finds on containerd's PATH"
	server, err := client.IntrospectionService().Server(ctx)
	if err != nil {
		return missing(name, err, "")
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", server.Pid))
	if err != nil {
		return missing(name, err, "run thaw check as root, in the PID namespace of containerd")
	}
	theirs, err := lookIn(string(environ), "criu")
	if err != nil {
		return missing(name, err, "install criu in a folder of containerd's PATH, e.g. /usr/local/sbin")
	}
	ours, err := exec.LookPath(checked)
	if err != nil {
		return missing(name, err, remedy)
	}
	a, aErr := os.Stat(theirs)
	b, bErr := os.Stat(ours)
	if err := errors.Join(aErr, bErr); err != nil {
		return missing(name, err, remedy)
	}
	if !os.SameFile(a, b) {
		return missing(name, fmt.Errorf("runc runs %s, criu.path is %s", theirs, ours), remedy)
	}
	return found(name, "%s, as checked", theirs)
}

// lookIn finds a program on the PATH of an environment as in /proc/PID/environ.
func lookIn(environ, program string) (string, error) {
	for v := range strings.SplitSeq(environ, "\x00") {
		path, ok := strings.CutPrefix(v, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(path) {
			if !filepath.IsAbs(dir) {
				continue // exec.LookPath does not run those either
			}
			if file, err := exec.LookPath(filepath.Join(dir, program)); err == nil {
				return file, nil
			}
		}
		return "", fmt.Errorf("no %s in containerd's PATH %s", program, path)
	}
	return "", errors.New("containerd has no PATH")
}

func checkShim(ctx context.Context, client *containerd.Client) finding {
	info, err := client.RuntimeInfo(ctx, thawRuntime, nil)
	if err != nil {
		return missing("shim", err, "install "+thawShim+" in a folder of containerd's PATH, e.g. /usr/local/bin")
	}
	return found("shim", "%s %s", info.Name, info.Version.Version)
}

func checkHandler(ctx context.Context, client *containerd.Client) finding {
	const name, remedy = "handler thaw", `add [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.thaw] with runtime_type = "` + thawRuntime + `" to containerd's configuration`
	conn, ok := client.Conn().(grpc.ClientConnInterface)
	if !ok {
		return missing(name, fmt.Errorf("containerd's connection is a %T", client.Conn()), "")
	}
	s, err := cri.NewRuntimeServiceClient(conn).Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return missing(name, err, "enable the CRI plugin of containerd")
	}
	names := make([]string, 0, len(s.RuntimeHandlers))
	for _, h := range s.RuntimeHandlers {
		if h.Name == thawHandler {
			return found(name, "in CRI's configuration")
		}
		names = append(names, h.Name)
	}
	return missing(name, fmt.Errorf("CRI has the handlers %q", strings.Join(names, " ")), remedy)
}

func checkDaemon(ctx context.Context, socket string) finding {
	resp, err := list(ctx, socket)
	if err != nil {
		return missing("daemon", err, "")
	}
	return found("daemon", "answers at %s, %d restored containers", socket, len(resp.Restores))
}

// leastCache is how much room the page store should have, in bytes.
const leastCache = 1 << 30

func checkCache(dir string) finding {
	const name = "cache folder"
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return missing(name, fmt.Errorf("%s: %w", dir, err), "make the folder on a disk, or set cache_dir in thaw's configuration")
	}
	free := int64(st.Bavail) * st.Bsize
	switch {
	case st.Type == unix.OVERLAYFS_SUPER_MAGIC:
		return missing(name, fmt.Errorf("%s is on an overlay", dir), "set cache_dir in thaw's configuration to a folder on a disk")
	case free < leastCache:
		return missing(name, fmt.Errorf("%s has only %s left", dir, size(free)), "make room, or set cache_dir in thaw's configuration")
	}
	if err := unix.Access(dir, unix.W_OK); err != nil {
		return missing(name, fmt.Errorf("%s cannot be written: %w", dir, err), "run thaw as root")
	}
	return found(name, "%s, %s left", dir, size(free))
}

func checkState(dir string) finding {
	const name = "state folder"
	var st unix.Statfs_t
	err := unix.Statfs(dir, &st)
	if os.IsNotExist(err) {
		err = unix.Statfs(filepath.Dir(dir), &st) // the daemon makes it
	}
	switch {
	case err != nil:
		return missing(name, fmt.Errorf("%s: %w", dir, err), "set state_dir in thaw's configuration to a folder on a tmpfs")
	case st.Type != unix.TMPFS_MAGIC:
		return missing(name, fmt.Errorf("%s is not on a tmpfs", dir), "set state_dir in thaw's configuration to a folder on a tmpfs")
	}
	return found(name, "%s, %s left", dir, size(int64(st.Bavail)*st.Bsize))
}
