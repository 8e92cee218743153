// SPDX-License-Identifier: Apache-2.0

//go:build linux

// bench measures restores of the synthetic server side by side and writes build/bench/results.json.
//
// Systems, alternating in one run so that drift of the machine meets all alike:
//
//	thaw        a pod of the handler thaw; cache cold (nothing of the checkpoint on the node), cold but for the working set
//	            that was recorded at an earlier restore, or warm
//	eager       download all, unpack, runc restore
//	criu-local  runc restore with CRIU's own lazy-pages daemon, images on the local disk: the floor
//	cold        an ordinary start of the program
//
// ttfr_ms is the time from the request to start (the container's image is pulled and its sandbox runs already, as with every
// system) to the first correct reply, which touches 1 % of the memory.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"thaw.dev/thaw/test/stack"
)

// row is one measurement.
type row struct {
	System       string  `json:"system"`
	Workload     string  `json:"workload"`
	MemoryMiB    int     `json:"memory_mib"`
	Cache        string  `json:"cache"`
	WorkingSet   bool    `json:"working_set"` // the node knew what is touched first
	Run          int     `json:"run"`
	TTFR         float64 `json:"ttfr_ms"`
	BytesFetched int64   `json:"bytes_fetched"`
	Requests     int     `json:"requests"`
	RemoteFaults uint64  `json:"remote_faults"` // of thaw: page faults that waited for the registry
	OK           bool    `json:"ok"`
	Error        string  `json:"error,omitempty"`
}

// cacheName is the state of the node for people.
func (r *row) cacheName() string {
	if r.Cache == "cold" && r.WorkingSet {
		return "cold+set"
	}
	return r.Cache
}

func main() {
	sizes := flag.String("sizes", "64,512,2048", "memory of the workload in MiB")
	runs := flag.Int("runs", 5, "runs of each system at each size")
	out := flag.String("out", "build/bench/results.json", "where the rows are written")
	flag.Parse()
	stack.Isolate()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := bench(ctx, *sizes, *runs, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func bench(ctx context.Context, sizes string, runs int, out string) (err error) {
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stderr})
	if err != nil {
		return err
	}
	defer func() {
		if cerr := s.Close(); err == nil {
			err = cerr
		}
	}()
	var rows []row
	for size := range strings.SplitSeq(sizes, ",") {
		mib, err := strconv.Atoi(size)
		if err != nil || mib < 1 {
			return fmt.Errorf("-sizes: %q is no number of MiB", size)
		}
		more, err := benchSize(ctx, s, mib, runs)
		rows = append(rows, more...)
		if err != nil {
			return err
		}
	}
	if err := write(out, rows); err != nil {
		return err
	}
	printTable(os.Stdout, rows)
	for _, r := range rows {
		if !r.OK {
			return fmt.Errorf("%s at %d MiB, run %d: %s", r.System, r.MemoryMiB, r.Run, r.Error)
		}
	}
	return nil
}

func write(path string, rows []row) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// benchSize makes a checkpoint of one size and measures all systems with it.
func benchSize(ctx context.Context, s *stack.Stack, mib, runs int) ([]row, error) {
	w, err := prepare(ctx, s, mib)
	if err != nil {
		return nil, fmt.Errorf("%d MiB: %w", mib, err)
	}
	defer w.remove()
	systems := []struct {
		name, cache string
		workingSet  bool
		measure     func(context.Context, *trial) error
	}{
		{"thaw", "cold", false, w.thawCold},
		{"eager", "cold", false, w.eager},
		{"thaw", "cold", true, w.thawColdWithSet},
		{"thaw", "warm", true, w.thawWarm},
		{"criu-local", "warm", false, w.criuLocal},
		{"cold", "cold", false, w.cold},
	}
	var rows []row
	for run := range runs {
		for _, system := range systems {
			r := row{System: system.name, Workload: "synthetic", MemoryMiB: mib, Cache: system.cache, WorkingSet: system.workingSet, Run: run}
			t := &trial{row: &r, registry: s.Registry}
			ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
			err := system.measure(ctx, t)
			cancel()
			if r.OK = err == nil; !r.OK {
				r.Error = err.Error()
			}
			fmt.Fprintf(os.Stderr, "%5d MiB  run %d  %-10s %-8s  %8.1f ms  %11d bytes  %5d requests  %4d remote faults  %s\n",
				mib, run, r.System, r.cacheName(), r.TTFR, r.BytesFetched, r.Requests, r.RemoteFaults, r.Error)
			rows = append(rows, r)
		}
	}
	return rows, nil
}
