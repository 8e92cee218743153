// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// writeReport writes results.md and ttfr.svg beside the rows.
func (b *bench) writeReport(ctx context.Context) error {
	var m markdown
	m.line("## Machine", "")
	m.line(b.machine(ctx)...)
	if b.plot() != "" {
		m.line("", "![First reply against memory, by system and link](ttfr.svg)")
	}
	m.line("", "## Targets", "")
	m.header("", "measured (the worst)", "target")
	for _, v := range b.judge() {
		m.row(v.outcome(), v.measured(), v.text)
	}
	b.firstReplies(&m)
	b.details(&m)
	b.filling(&m)
	b.faultTable(&m)
	b.cloneTable(&m)
	b.chunkTable(&m)
	if err := os.WriteFile(filepath.Join(filepath.Dir(b.out), "results.md"), []byte(m.String()), 0o644); err != nil {
		return err
	}
	return b.writePlot(filepath.Join(filepath.Dir(b.out), "ttfr.svg"))
}

// markdown writes lines and tables.
type markdown struct{ strings.Builder }

func (m *markdown) line(lines ...string) {
	for _, l := range lines {
		m.WriteString(l + "\n")
	}
}

func (m *markdown) row(cells ...string) { m.line("| " + strings.Join(cells, " | ") + " |") }

// header begins a table; columns after the first are aligned to the right.
func (m *markdown) header(cells ...string) {
	m.row(cells...)
	m.line("| --- " + strings.Repeat("| ---: ", len(cells)-1) + "|")
}

func milliseconds(ms float64) string {
	if ms == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f", ms)
}

// firstReplies is a table for each link.
func (b *bench) firstReplies(m *markdown) {
	for _, link := range []string{loopback, shaped} {
		places := slices.DeleteFunc(b.places(1), func(p place) bool { return p.link != link })
		if len(places) == 0 {
			continue
		}
		shown := slices.DeleteFunc(slices.Clone(variants), func(v variant) bool {
			return !slices.ContainsFunc(places, func(p place) bool { return b.first(p, v) > 0 })
		})
		title := "## First reply, unshaped link"
		if link == shaped {
			title = "## First reply, 1 Gbit/s and 1 ms"
		}
		m.line("", title, "", "Milliseconds, medians; behind them the number of runs where it is not that of the others.", "")
		head := []string{"", "MiB"}
		for _, v := range shown {
			head = append(head, v.String())
		}
		m.header(head...)
		for _, p := range places {
			cells := []string{p.workload, fmt.Sprint(p.mib)}
			for _, v := range shown {
				cell := milliseconds(b.first(p, v))
				if n := len(b.rowsOf(p, v, 1)); n > 0 && n != b.runs {
					cell += fmt.Sprintf(" (%d)", n)
				}
				cells = append(cells, cell)
			}
			m.row(cells...)
		}
	}
}

// details is about what thaw fetched and waited for.
func (b *bench) details(m *markdown) {
	places := slices.DeleteFunc(b.places(1), func(p place) bool { return len(b.rowsOf(p, withSet, 1)) == 0 })
	if len(places) == 0 {
		return
	}
	m.line("", "## What thaw had fetched by the first reply", "",
		"MiB as they are in the registry, medians. Remote faults are page faults that waited for the registry; untouched is what of the", "published working set the first reply did not touch.", "")
	m.header("", "MiB", "link", "state", "page index", "working set", "fetched with set", "requests", "remote faults", "untouched", "fetched without", "remote faults")
	for _, p := range places {
		with, without := b.rowsOf(p, withSet, 1), b.rowsOf(p, variant{thaw, "cold"}, 1)
		m.row(p.workload, fmt.Sprint(p.mib), p.link,
			fmt.Sprintf("%.2f", b.value(stateSize, thaw, p)), fmt.Sprintf("%.2f", b.value(indexSize, thaw, p)), fmt.Sprintf("%.1f", b.value(setSize, thaw, p)),
			fmt.Sprintf("%.1f", median(column(with, fetched))/mebibyte), fmt.Sprintf("%.0f", median(column(with, requests))), fmt.Sprintf("%.0f", median(column(with, remoteFaults))),
			fmt.Sprintf("%.0f %%", b.value(setUntouched, thaw, p)),
			fmt.Sprintf("%.1f", median(column(without, fetched))/mebibyte), fmt.Sprintf("%.0f", median(column(without, remoteFaults))))
	}
}

// filling is about the policy complete.
func (b *bench) filling(m *markdown) {
	places := slices.DeleteFunc(b.places(1), func(p place) bool { return b.value(resident95, thaw, p) == 0 })
	if len(places) == 0 {
		return
	}
	m.line("", "## Filling all memory (policy `complete`)", "",
		"From the request to start until 95 % of the memory is resident; rate from the first reply until all is; processor time of daemon and", "shim for a GB of memory, the restore itself included. Eager's memory is resident when it replies.", "")
	m.header("MiB", "link", "95 % resident", "eager", "rate", "processor time")
	for _, p := range places {
		m.row(fmt.Sprint(p.mib), p.link, fmt.Sprintf("%.2f s", b.value(resident95, thaw, p)),
			fmt.Sprintf("%.2f s", b.first(p, variant{eager, "cold"})/1000),
			fmt.Sprintf("%.0f MB/s", b.value(fillRate, thaw, p)), fmt.Sprintf("%.2f s/GB", b.value(fillCPU, thaw, p)))
	}
}

// faultTable is about single faults.
func (b *bench) faultTable(m *markdown) {
	p := synth(faultsMiB, loopback)
	if b.value(faultName(50, faultThreads[0]), thaw, p) == 0 {
		return
	}
	m.line("", "## Single page faults on pages that are on the node", "",
		"Microseconds until the first touch of a page of the synthetic server returns, as it sees it; medians of the runs' quantiles.", "")
	head := []string{""}
	for _, threads := range faultThreads {
		head = append(head, fmt.Sprintf("p50, %d threads", threads), fmt.Sprintf("p99, %d threads", threads))
	}
	m.header(head...)
	for _, system := range []string{thaw, criuLocal} {
		cells := []string{system}
		for _, threads := range faultThreads {
			for _, q := range []int{50, 99} {
				cells = append(cells, milliseconds(b.value(faultName(q, threads), system, p)))
			}
		}
		m.row(cells...)
	}
}

// cloneTable is about many restores at once.
func (b *bench) cloneTable(m *markdown) {
	places := b.places(clones)
	if len(places) == 0 {
		return
	}
	m.line("", fmt.Sprintf("## %d restores of one image, started together", clones), "", "Milliseconds until the last one has replied, medians.", "")
	m.header("MiB", "link", thaw, criuLocal, "fetched by thaw", "by one restore")
	for _, p := range places {
		with := b.rowsOf(p, withSet, clones)
		m.row(fmt.Sprint(p.mib), p.link, milliseconds(median(column(with, ttfr))),
			milliseconds(median(column(b.rowsOf(p, variant{criuLocal, "warm"}, clones), ttfr))),
			fmt.Sprintf("%.2f MiB", median(column(with, fetched))/mebibyte),
			fmt.Sprintf("%.2f MiB", median(column(b.rowsOf(p, withSet, 1), fetched))/mebibyte))
	}
}
