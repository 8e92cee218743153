// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"slices"
)

// place is what is restored over which link.
type place struct {
	workload string
	mib      int
	link     string
}

// variant is a system with what node and registry hold for it, as people call it.
type variant struct{ system, cache string }

// The variants, in the order of tables.
var variants = []variant{
	{thaw, "cold"},
	{thaw, "cold+set"},
	{thaw, "warm"},
	{eager, "cold"},
	{podman, "cold"},
	{estargz, "cold"},
	{criuLocal, "warm"},
	{coldStart, "cold"},
}

// withSet is the variant that most targets are about.
var withSet = variant{thaw, "cold+set"}

func (v variant) String() string {
	switch v.system {
	case thaw:
		return thaw + ", " + v.cache
	case coldStart:
		return "cold start"
	}
	return v.system
}

// places are where rows of so many clones were measured, in the order of the first.
func (r *results) places(clones int) []place {
	var all []place
	for _, row := range r.rows {
		p := place{row.Workload, row.MemoryMiB, row.Link}
		if row.OK && row.Clones == clones && !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

// rowsOf gives the rows of a variant in the order of the runs.
func (r *results) rowsOf(p place, v variant, clones int) []row {
	var rows []row
	for _, row := range r.rows {
		if row.OK && row.Clones == clones && (place{row.Workload, row.MemoryMiB, row.Link}) == p && (variant{row.System, row.cacheName()}) == v {
			rows = append(rows, row)
		}
	}
	return rows
}

// column takes a value out of each row.
func column[T int | int64 | uint64 | float64](rows []row, value func(row) T) []float64 {
	v := make([]float64, len(rows))
	for i, r := range rows {
		v[i] = float64(value(r))
	}
	return v
}

func ttfr(r row) float64        { return r.TTFR }
func fetched(r row) int64       { return r.BytesFetched }
func requests(r row) int        { return r.Requests }
func remoteFaults(r row) uint64 { return r.RemoteFaults }

// first is the median time to the first reply in milliseconds; 0 if it was not measured.
func (r *results) first(p place, v variant) float64 { return median(column(r.rowsOf(p, v, 1), ttfr)) }

// value is the median of another measurement; 0 if there is none.
func (r *results) value(name, system string, p place) float64 {
	var v []float64
	for _, m := range r.measures {
		if m.Name == name && m.System == system && (place{m.Workload, m.MemoryMiB, m.Link}) == p {
			v = append(v, m.Value)
		}
	}
	return median(v)
}

// median of nothing is 0.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
