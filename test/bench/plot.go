// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"thaw.dev/thaw/test/workloads"
)

// Geometry of the plot, in SVG's units.
const (
	panelWidth, panelHeight  = 430, 400
	marginLeft, marginTop    = 70, 60
	marginBetween, marginEnd = 60, 110
)

// colours of the variants, in their order; of a set that people with colour blindness can tell apart (Okabe and Ito).
var colours = []string{"#0072b2", "#009e73", "#56b4e9", "#d55e00", "#cc79a7", "#e69f00", "#000000", "#999999"}

// point is a size in MiB and a time in milliseconds.
type point struct{ mib, ms float64 }

// axis maps values to positions, both in powers.
type axis struct{ low, high, from, to float64 }

func (a axis) at(v float64) float64 {
	return a.from + (a.to-a.from)*math.Log(v/a.low)/math.Log(a.high/a.low)
}

// plot draws the first reply against the memory of the synthetic server, a panel for each link, both axes logarithmic.
func (r *results) plot() string {
	var links []string
	var sizes []float64
	least, most := math.Inf(1), 0.0
	for _, p := range r.places(1) {
		if p.workload != workloads.Synthetic {
			continue
		}
		if !slices.Contains(links, p.link) {
			links = append(links, p.link)
		}
		if !slices.Contains(sizes, float64(p.mib)) {
			sizes = append(sizes, float64(p.mib))
		}
		for _, v := range variants {
			if ms := r.first(p, v); ms > 0 {
				least, most = min(least, ms), max(most, ms)
			}
		}
	}
	if len(sizes) < 2 {
		return ""
	}
	slices.Sort(sizes)
	width := marginLeft + len(links)*(panelWidth+marginBetween)
	height := marginTop + panelHeight + marginEnd
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="13">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	text(&b, marginLeft, 24, "start", 16, "Time to the first correct reply against memory (medians, both axes logarithmic)")
	for i, link := range links {
		left := float64(marginLeft + i*(panelWidth+marginBetween))
		x := axis{sizes[0], sizes[len(sizes)-1], left, left + panelWidth}
		// Whole powers of ten, so that the lines of the grid are the frame.
		y := axis{math.Pow(10, math.Floor(math.Log10(least))), math.Pow(10, math.Ceil(math.Log10(most))), marginTop + panelHeight, marginTop}
		r.panel(&b, link, sizes, x, y)
	}
	for i, v := range variants {
		x, y := float64(marginLeft+i%4*(width-marginLeft)/4), float64(marginTop+panelHeight+62+i/4*22)
		fmt.Fprintf(&b, `<line x1="%.0f" y1="%.0f" x2="%.0f" y2="%.0f" stroke="%s" stroke-width="3"/>`+"\n", x, y, x+24, y, colours[i])
		text(&b, x+30, y+4, "start", 13, v.String())
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// panel draws the grid and the lines of one link.
func (r *results) panel(b *strings.Builder, link string, sizes []float64, x, y axis) {
	text(b, (x.from+x.to)/2, marginTop-12, "middle", 14, map[string]string{loopback: "unshaped link", shaped: "1 Gbit/s, 1 ms"}[link])
	for _, mib := range sizes {
		line(b, point{x.at(mib), y.from}, point{x.at(mib), y.to}, "#dddddd", 1)
		text(b, x.at(mib), y.from+18, "middle", 13, fmt.Sprintf("%.0f", mib))
	}
	text(b, (x.from+x.to)/2, y.from+38, "middle", 13, "memory in MiB")
	for ms := y.low; ms < y.high*1.01; ms *= 10 {
		for part := 1.0; part < 10 && ms*part < y.high*1.01; part++ {
			colour := "#f0f0f0"
			if part == 1 {
				colour = "#bbbbbb"
				label := fmt.Sprintf("%.0f ms", ms)
				if ms >= 1000 {
					label = fmt.Sprintf("%.0f s", ms/1000)
				}
				text(b, x.from-6, y.at(ms)+4, "end", 13, label)
			}
			line(b, point{x.from, y.at(ms * part)}, point{x.to, y.at(ms * part)}, colour, 1)
		}
	}
	for i, v := range variants {
		var last *point
		for _, mib := range sizes {
			ms := r.first(synth(int(mib), link), v)
			if ms == 0 {
				continue
			}
			p := point{x.at(mib), y.at(ms)}
			if last != nil {
				line(b, *last, p, colours[i], 2.5)
			}
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`+"\n", p.mib, p.ms, colours[i])
			last = &p
		}
	}
}

func line(b *strings.Builder, from, to point, colour string, width float64) {
	fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="%g"/>`+"\n", from.mib, from.ms, to.mib, to.ms, colour, width)
}

// text writes words, none of which need escaping.
func text(b *strings.Builder, x, y float64, anchor string, size int, words string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d">%s</text>`+"\n", x, y, anchor, size, words)
}

// writePlot writes the plot, unless there are too few sizes for one.
func (r *results) writePlot(path string) error {
	if svg := r.plot(); svg != "" {
		return os.WriteFile(path, []byte(svg), 0o644)
	}
	return nil
}
