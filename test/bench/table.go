// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// key is what one line of the table is about.
type key struct {
	workload      string
	mib           int
	link          string
	system, cache string
}

// printTable prints medians, and how many times sooner each system replied than eager.
func printTable(w io.Writer, rows []row) {
	times := make(map[key][]float64)
	bytes := make(map[key][]float64)
	requests := make(map[key][]float64)
	remote := make(map[key][]float64)
	var order []key
	for _, r := range rows {
		if !r.OK || r.Clones != 1 {
			continue
		}
		k := key{r.Workload, r.MemoryMiB, r.Link, r.System, r.cacheName()}
		if times[k] == nil {
			order = append(order, k)
		}
		times[k] = append(times[k], r.TTFR)
		bytes[k] = append(bytes[k], float64(r.BytesFetched))
		requests[k] = append(requests[k], float64(r.Requests))
		remote[k] = append(remote[k], float64(r.RemoteFaults))
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "workload\tMiB\tlink\tsystem\tcache\tfirst reply\tmin\tmax\tvs eager\tfetched\trequests\tremote faults\truns\t")
	for _, k := range order {
		ratio := "-"
		if e := times[key{k.workload, k.mib, k.link, eager, "cold"}]; e != nil {
			ratio = fmt.Sprintf("%.1fx", median(e)/median(times[k]))
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%.0f ms\t%.0f\t%.0f\t%s\t%.1f MiB\t%.0f\t%.0f\t%d\t\n",
			k.workload, k.mib, k.link, k.system, k.cache, median(times[k]), slices.Min(times[k]), slices.Max(times[k]), ratio,
			median(bytes[k])/(1<<20), median(requests[k]), median(remote[k]), len(times[k]))
	}
	t.Flush()
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
