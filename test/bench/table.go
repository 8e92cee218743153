// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// printTable prints medians, and how many times sooner each system replied than eager.
func (r *results) printTable(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "workload\tMiB\tlink\tsystem\tcache\tfirst reply\tmin\tmax\tvs eager\tfetched\trequests\tremote faults\truns\t")
	for _, p := range r.places(1) {
		for _, v := range variants {
			rows := r.rowsOf(p, v, 1)
			if len(rows) == 0 {
				continue
			}
			times := column(rows, ttfr)
			ratio := "-"
			if e := r.first(p, variant{eager, "cold"}); e > 0 {
				ratio = fmt.Sprintf("%.1fx", e/median(times))
			}
			fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%.0f ms\t%.0f\t%.0f\t%s\t%.1f MiB\t%.0f\t%.0f\t%d\t\n",
				p.workload, p.mib, p.link, v.system, v.cache, median(times), slices.Min(times), slices.Max(times), ratio,
				median(column(rows, fetched))/mebibyte, median(column(rows, requests)), median(column(rows, remoteFaults)), len(rows))
		}
	}
	t.Flush()
}
