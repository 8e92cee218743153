// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"text/tabwriter"

	"thaw.dev/thaw/test/workloads"
)

// target is a bound that was set before anything was measured. Missing one fails nothing.
type target struct {
	text  string
	limit float64
	least bool // limit is the least that is wanted, not the most
	// each gives the measured values, by what they are of; NaN where something was not measured.
	each func(r *results) map[string]float64
	unit string
}

// verdict is what came of a target.
type verdict struct {
	target
	worst float64
	of    string // what the worst value is of
	known bool
	hit   bool
}

func (v verdict) outcome() string {
	switch {
	case !v.known:
		return "not measured"
	case v.hit:
		return "hit"
	}
	return "missed"
}

func (v verdict) measured() string {
	if !v.known {
		return "-"
	}
	return fmt.Sprintf("%.3g%s (%s)", v.worst, v.unit, v.of)
}

func (t target) judge(r *results) verdict {
	v := verdict{target: t}
	within := func(value, limit float64) bool {
		if t.least {
			return value >= limit
		}
		return value <= limit
	}
	values := t.each(r)
	for _, of := range slices.Sorted(maps.Keys(values)) {
		value := values[of]
		if math.IsNaN(value) {
			continue
		}
		if !v.known || !within(value, v.worst) {
			v.worst, v.of = value, of
		}
		v.known = true
	}
	v.hit = v.known && within(v.worst, t.limit)
	return v
}

func synth(mib int, link string) place { return place{workloads.Synthetic, mib, link} }

func (p place) String() string {
	if p.workload == workloads.Synthetic {
		return fmt.Sprintf("%d MiB, %s", p.mib, p.link)
	}
	return p.workload + ", " + p.link
}

// ratios divides the first reply of one variant by another's, at all places for which keep is true.
func ratios(r *results, a, b variant, keep func(place) bool) map[string]float64 {
	all := make(map[string]float64)
	for _, p := range r.places(1) {
		if keep(p) {
			all[p.String()] = ratio(r.first(p, a), r.first(p, b))
		}
	}
	return all
}

func everywhere(place) bool { return true }

// ratio is NaN unless both were measured.
func ratio(a, b float64) float64 {
	if a == 0 || b == 0 {
		return math.NaN()
	}
	return a / b
}

// one is a single value.
func one(of string, value float64) map[string]float64 { return map[string]float64{of: value} }

// ofSets gives a value for each place at which thaw restored with a published working set.
func ofSets(value func(r *results, p place, rows []row) float64) func(*results) map[string]float64 {
	return func(r *results) map[string]float64 {
		all := make(map[string]float64)
		for _, p := range r.places(1) {
			if rows := r.rowsOf(p, withSet, 1); len(rows) > 0 {
				all[p.String()] = value(r, p, rows)
			}
		}
		return all
	}
}

const mebibyte = 1 << 20

// targets in the order in which they are printed.
var targets = []target{
	{"sooner than eager at 512 MiB, nothing on the node, unshaped: at least 5 times", 5, true, func(r *results) map[string]float64 {
		return ratios(r, variant{eager, "cold"}, variant{thaw, "cold"}, func(p place) bool { return p == synth(512, loopback) })
	}, "x"},
	{"sooner than eager at 2048 MiB, nothing on the node, unshaped: at least 12 times", 12, true, func(r *results) map[string]float64 {
		return ratios(r, variant{eager, "cold"}, variant{thaw, "cold"}, func(p place) bool { return p == synth(2048, loopback) })
	}, "x"},
	{"time at 2048 MiB to that at 64 MiB, nothing on the node, unshaped: at most 1.5", 1.5, false, func(r *results) map[string]float64 {
		return one("unshaped", ratio(r.first(synth(2048, loopback), variant{thaw, "cold"}), r.first(synth(64, loopback), variant{thaw, "cold"})))
	}, ""},
	{"fetched by the first reply at 2048 MiB, nothing on the node: at most 10 % of the memory", 10, false, func(r *results) map[string]float64 {
		rows := r.rowsOf(synth(2048, loopback), variant{thaw, "cold"}, 1)
		if len(rows) == 0 {
			return nil
		}
		return one("unshaped", 100*median(column(rows, fetched))/(2048*mebibyte))
	}, " %"},
	{"time to the floor's (CRIU's own daemon, local files), with working set, shaped link, working set under 40 MiB: at most 1.3", 1.3, false, func(r *results) map[string]float64 {
		return ratios(r, withSet, variant{criuLocal, "warm"}, func(p place) bool {
			return p.link == shaped && r.value(setSize, thaw, p) < 40
		})
	}, ""},
	{"time at 4096 MiB to that at 64 MiB, with working set, shaped link: at most 1.15", 1.15, false, func(r *results) map[string]float64 {
		return one("shaped", ratio(r.first(synth(4096, shaped), withSet), r.first(synth(64, shaped), withSet)))
	}, ""},
	{"sooner than eager at 2048 MiB, with working set: at least 20 times", 20, true, func(r *results) map[string]float64 {
		return ratios(r, variant{eager, "cold"}, withSet, func(p place) bool { return p.workload == workloads.Synthetic && p.mib == 2048 })
	}, "x"},
	{"sooner than CRIU's daemon over eStargz, with working set: at least 3 times", 3, true, func(r *results) map[string]float64 {
		return ratios(r, variant{estargz, "cold"}, withSet, everywhere)
	}, "x"},
	{"sooner than Podman, with working set: everywhere", 1, true, func(r *results) map[string]float64 {
		return ratios(r, variant{podman, "cold"}, withSet, everywhere)
	}, "x"},
	{"fetched by the first reply to working set, state and page index together: at most 1.2", 1.2, false, ofSets(func(r *results, p place, rows []row) float64 {
		return ratio(median(column(rows, fetched))/mebibyte, r.value(setSize, thaw, p)+r.value(stateSize, thaw, p)+r.value(indexSize, thaw, p))
	}), ""},
	{"page faults that waited for the registry, with published working set: at most 5", 5, false, ofSets(func(_ *results, _ place, rows []row) float64 {
		return median(column(rows, remoteFaults))
	}), ""},
	{"touched chunks that were there before they were touched: at least 95 %", 95, true, ofSets(func(r *results, p place, rows []row) float64 {
		return 100 - 100*median(column(rows, remoteFaults))/ratio(r.value(touchedChunks, thaw, p), 1)
	}), " %"},
	{"prefetched bytes that were not touched: at most 20 %", 20, false, ofSets(func(r *results, p place, _ []row) float64 {
		if r.value(touchedChunks, thaw, p) == 0 {
			return math.NaN()
		}
		return r.value(setUntouched, thaw, p)
	}), " %"},
	{"time until 95 % of the memory is resident (policy complete) to eager's first reply: at most 1.1", 1.1, false, func(r *results) map[string]float64 {
		all := make(map[string]float64)
		for _, p := range r.places(1) {
			all[p.String()] = ratio(1000*r.value(resident95, thaw, p), r.first(p, variant{eager, "cold"}))
		}
		return all
	}, ""},
	{"p50 of a fault on a cached page to that of CRIU's own daemon on local files: at most 1", 1, false, func(r *results) map[string]float64 {
		all := make(map[string]float64)
		for _, threads := range faultThreads {
			p := synth(faultsMiB, loopback)
			all[fmt.Sprintf("%d threads", threads)] = ratio(r.value(faultName(50, threads), thaw, p), r.value(faultName(50, threads), criuLocal, p))
		}
		return all
	}, ""},
	{"p99 to p50 of a fault on a cached page, 8 threads at once: at most 2", 2, false, func(r *results) map[string]float64 {
		p := synth(faultsMiB, loopback)
		return one("8 threads", ratio(r.value(faultName(99, 8), thaw, p), r.value(faultName(50, 8), thaw, p)))
	}, ""},
	{"rate at which 2048 MiB are filled, of the shaped link's: at least 80 %", 80, true, func(r *results) map[string]float64 {
		return one("2048 MiB, shaped", 100*ratio(r.value(fillRate, thaw, synth(2048, shaped))*1e6, float64(shape.Rate)))
	}, " %"},
	{"processor time of daemon and shim for a GB of 2048 MiB filled over the shaped link: at most 1.4 s", 1.4, false, func(r *results) map[string]float64 {
		return one("2048 MiB, shaped", ratio(r.value(fillCPU, thaw, synth(2048, shaped)), 1))
	}, " s"},
	{"registry bytes of 32 restores at once to those of one: at most 1.05", 1.05, false, func(r *results) map[string]float64 {
		all := make(map[string]float64)
		for _, p := range r.places(clones) {
			all[p.String()] = ratio(median(column(r.rowsOf(p, withSet, clones), fetched)), median(column(r.rowsOf(p, withSet, 1), fetched)))
		}
		return all
	}, ""},
	{"time of 32 restores at once to that of 32 floor restores: at most 1.2", 1.2, false, func(r *results) map[string]float64 {
		all := make(map[string]float64)
		for _, p := range r.places(clones) {
			all[p.String()] = ratio(median(column(r.rowsOf(p, withSet, clones), ttfr)), median(column(r.rowsOf(p, variant{criuLocal, "warm"}, clones), ttfr)))
		}
		return all
	}, ""},
}

// judge gives the verdicts on all targets.
func (r *results) judge() []verdict {
	var all []verdict
	for _, t := range targets {
		all = append(all, t.judge(r))
	}
	return all
}

// printTargets prints the verdicts on what was measured.
func (r *results) printTargets(w io.Writer) {
	known := slices.DeleteFunc(r.judge(), func(v verdict) bool { return !v.known })
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, v := range known {
		fmt.Fprintf(t, "%s\t%s\t%s\n", v.outcome(), v.measured(), v.text)
	}
	t.Flush()
}
