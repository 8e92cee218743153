// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// machine describes in lines of Markdown what was measured on and with.
func (b *bench) machine(ctx context.Context) []string {
	var u unix.Utsname
	kernel := "unknown"
	if err := unix.Uname(&u); err == nil {
		kernel = unix.ByteSliceToString(u.Release[:])
	}
	var info unix.Sysinfo_t
	memory := "unknown"
	if err := unix.Sysinfo(&info); err == nil {
		memory = fmt.Sprintf("%.0f GiB", float64(info.Totalram)*float64(info.Unit)/(1<<30))
	}
	lines := []string{
		fmt.Sprintf("- %s; %d processors (%s), %s of memory, Linux %s", time.Now().UTC().Format("2 January 2006"), runtime.NumCPU(), processor(), memory, kernel),
		"- registry, containerd, shims and containers on this one machine: they share its processors",
	}
	for _, l := range b.links {
		lines = append(lines, "- "+l.String())
	}
	if congestion, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"); err == nil {
		lines = append(lines, "- TCP congestion control: "+strings.TrimSpace(string(congestion)))
	}
	var versions []string
	for _, c := range [][]string{{"thaw", "--version"}, {"containerd", "--version"}, {"runc", "--version"}, {"criu", "--version"}, {"podman", "--version"}} {
		path := filepath.Join(b.s.Bin, c[0])
		if _, err := os.Stat(path); err != nil {
			path = c[0]
		}
		out, err := exec.CommandContext(ctx, path, c[1:]...).Output()
		if err != nil {
			continue // not every part is on every machine
		}
		line, _, _ := strings.Cut(string(out), "\n")
		versions = append(versions, c[0]+" "+version(line))
	}
	return append(lines, "- "+strings.Join(versions, ", ")+", "+runtime.Version())
}

// version finds the version in what programs say of themselves: the first word with a digit that is no path.
func version(line string) string {
	for _, f := range strings.Fields(line) {
		if strings.ContainsAny(f, "0123456789") && !strings.Contains(f, "/") {
			return f
		}
	}
	return strings.TrimSpace(line)
}

func processor() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
