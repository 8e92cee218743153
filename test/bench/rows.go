// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Links between node and registry.
const (
	loopback = "loopback" // nothing added
	shaped   = "1g-1ms"   // 1 Gbit/s in each direction, 1 ms more for a round trip
)

// Names of systems.
const (
	thaw      = "thaw"
	eager     = "eager"
	criuLocal = "criu-local"
	coldStart = "cold"
	podman    = "podman"
	estargz   = "estargz-criu"
)

// row is one measurement of a first reply.
type row struct {
	System       string  `json:"system"`
	Workload     string  `json:"workload"`
	MemoryMiB    int     `json:"memory_mib"`
	Link         string  `json:"link"`
	Cache        string  `json:"cache"`
	WorkingSet   bool    `json:"working_set"` // of thaw: a working set was published beside the image
	Clones       int     `json:"clones"`      // restored at the same time; then TTFR is the last one's
	Run          int     `json:"run"`
	TTFR         float64 `json:"ttfr_ms"`
	BytesFetched int64   `json:"bytes_fetched"`
	Requests     int     `json:"requests"`
	RemoteFaults uint64  `json:"remote_faults"`          // of thaw: page faults that waited for the registry
	Faults       uint64  `json:"faults,omitempty"`       // of thaw: all page faults
	WaitP50      float64 `json:"fault_p50_us,omitempty"` // of thaw: how long they waited
	WaitP99      float64 `json:"fault_p99_us,omitempty"`
	OK           bool    `json:"ok"`
	Error        string  `json:"error,omitempty"`
}

// cacheName is the state of the node, and of the registry, for people.
func (r *row) cacheName() string {
	if r.Cache == "cold" && r.WorkingSet {
		return "cold+set"
	}
	return r.Cache
}

// measure is one measurement of something else than a first reply.
type measure struct {
	Name      string  `json:"name"`
	System    string  `json:"system"`
	Workload  string  `json:"workload"`
	MemoryMiB int     `json:"memory_mib"`
	Link      string  `json:"link"`
	Run       int     `json:"run"`
	Value     float64 `json:"value"`
	Unit      string  `json:"unit"`
}

// results are all that was measured.
type results struct {
	rows     []row
	measures []measure
	links    []linkFacts
}

// write writes the rows, and beside them the other measurements.
func (r *results) write(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := writeJSON(path, r.rows); err != nil {
		return err
	}
	return writeJSON(filepath.Join(filepath.Dir(path), "measures.json"), r.measures)
}

func writeJSON(path string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// add keeps a measurement and shows it.
func (r *results) add(m measure) {
	r.measures = append(r.measures, m)
	fmt.Fprintf(os.Stderr, "%-9s %5d MiB  %-8s  run %d  %-12s  %s: %.2f %s\n", m.Workload, m.MemoryMiB, m.Link, m.Run, m.System, m.Name, m.Value, m.Unit)
}
