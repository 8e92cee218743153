// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"thaw.dev/thaw/test/collector"
)

const startContainer = "runtime.v1.RuntimeService/StartContainer"

// steps cut a start into parts that follow each other: each ends where a span begins or ends, the first begins with
// the request.
var steps = []struct {
	name string // of the part
	span string
	end  bool // it ends where the span ends, and not where it begins
}{
	{"containerd: task, bundle", "containerd.task.v3.Task/Create", false},
	{"shim: spec; daemon called", "thaw.node.v1.Node/Prepare", false},
	{"daemon: image resolved", "thaw.restore.Resolve", true},
	{"daemon: CRIU known, checkpoint laid out", "thaw.restore.Layout", true},
	{"daemon: admission of the images", "thaw.restore.Admit", true},
	{"daemon: page store opened, restore recorded", "thaw.node.v1.Node/Prepare", true},
	{"shim: view, page index, second holder, socket", "thaw.shim.Ready", true},
	{"runc's task service: root filesystem, streams", "thaw.shim.CreateTask", true},
	{"containerd: between create and start", "containerd.task.v3.Task/Start", false},
	{"daemon: admission in the root filesystem", "thaw.node.v1.Node/Admit", true},
	{"shim: answer taken", "thaw.shim.Restore", false},
	{"runc: start, asks CRIU's version, cgroup; CRIU's start", "criu.images", false},
	{"CRIU: options, features, process tree", "criu.images", true},
	{"CRIU: root task forked", "criu.fork", true},
	{"CRIU: UTS and other namespaces", "criu.namespaces", true},
	{"CRIU: IPC namespace", "criu.ipc", true},
	{"CRIU: network namespace", "criu.network", true},
	{"CRIU: mounts", "criu.mounts", true},
	{"CRIU: files, sockets, tables of resources", "criu.resources", true},
	{"CRIU: mappings, eager pages", "criu.memory", true},
	{"CRIU: restorer, userfaultfd, threads", "criu.restorer", true},
	{"CRIU: runc's post-restore work", "criu.post-restore", true},
	{"CRIU: network unlocked", "criu.unlock", true},
	{"CRIU: tasks let go", "criu.resume", true},
	{"", "", false}, // the first instruction
	{"runc: its end; streams", "thaw.shim.Restore", true},
	{"shim: OOM score, accounting", "containerd.task.v3.Task/Start", true},
	{"containerd: answer", startContainer, true},
}

// table collects how long each part took.
type table struct {
	parts map[string][]time.Duration // by name
	first []time.Duration            // until the first instruction
	whole []time.Duration            // of the request
	reply []time.Duration            // until the first reply
	inner map[string][]time.Duration
}

func (t *table) add(trace collector.Trace, reply time.Duration) {
	if t.parts == nil {
		t.parts, t.inner = make(map[string][]time.Duration), make(map[string][]time.Duration)
	}
	at := trace[0].Start
	for _, s := range steps {
		if s.span == "" {
			t.first = append(t.first, at.Sub(trace[0].Start))
			continue
		}
		span := trace.Find(s.span)
		if span == nil {
			continue
		}
		to := span.Start
		if s.end {
			to = span.End
		}
		t.parts[s.name] = append(t.parts[s.name], to.Sub(at))
		at = to
	}
	t.whole = append(t.whole, trace[0].Took())
	t.reply = append(t.reply, reply)
	for _, s := range trace {
		switch {
		case strings.HasPrefix(s.Name, "criu.mounts."):
			name := strings.TrimPrefix(s.Name, "criu.mounts.") + " " + s.Attributes["path"]
			t.inner[name] = append(t.inner[name], s.Took())
		case s.Name == "thaw.shim.HandOver":
			t.inner["process handed over"] = append(t.inner["process handed over"], s.Took())
		}
	}
}

// print prints the medians as a table in Markdown.
func (t *table) print(w io.Writer) {
	fmt.Fprintf(w, "Medians of %d warm restores, in ms.\n\n| part | took | since the request |\n| --- | ---: | ---: |\n", len(t.whole))
	var sum time.Duration
	for _, s := range steps {
		if s.span == "" {
			fmt.Fprintf(w, "| **first instruction** | | **%s** |\n", ms(median(t.first)))
			continue
		}
		took := median(t.parts[s.name])
		sum += took
		fmt.Fprintf(w, "| %s | %s | %s |\n", s.name, ms(took), ms(sum))
	}
	fmt.Fprintf(w, "| the whole request | %s | |\n| first reply to a client | %s | |\n", ms(median(t.whole)), ms(median(t.reply)))
	fmt.Fprintf(w, "\nWithin them, where seen:\n\n| part | took |\n| --- | ---: |\n")
	names := make([]string, 0, len(t.inner))
	for name, list := range t.inner {
		if 2*len(list) >= len(t.whole) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(w, "| %s | %s |\n", name, ms(median(t.inner[name])))
	}
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f", 1e3*d.Seconds()) }

func median(list []time.Duration) time.Duration {
	if len(list) == 0 {
		return 0
	}
	list = slices.Sorted(slices.Values(list))
	return (list[(len(list)-1)/2] + list[len(list)/2]) / 2
}

// printSpans prints a trace as a tree.
func printSpans(w io.Writer, t collector.Trace) {
	for _, s := range t {
		fmt.Fprintf(w, "%9.3f %9.3f  %s%s\n", 1e3*s.Start.Sub(t[0].Start).Seconds(), 1e3*s.Took().Seconds(), strings.Repeat("  ", len(t.Parents(s))), s.Name)
	}
	fmt.Fprintln(w)
}
