// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

// measured gives results in which thaw with a working set takes as long as said, and all others a second.
func measured(ms map[place]float64) *results {
	r := &results{}
	for _, v := range variants {
		for p, took := range ms {
			if v != withSet {
				took = 1000
			}
			cache, _, set := strings.Cut(v.cache, "+")
			for run := range 3 {
				// The middle one counts.
				r.rows = append(r.rows, row{
					System: v.system, Cache: cache, WorkingSet: set, Workload: p.workload, MemoryMiB: p.mib, Link: p.link, Clones: 1, Run: run,
					TTFR: took * float64(run+1) / 2, OK: true,
				})
			}
		}
	}
	return r
}

func verdictOn(t *testing.T, r *results, text string) verdict {
	t.Helper()
	for _, v := range r.judge() {
		if strings.HasPrefix(v.text, text) {
			return v
		}
	}
	t.Fatalf("no target %q", text)
	return verdict{}
}

func TestWorstDecides(t *testing.T) {
	r := measured(map[place]float64{synth(64, shaped): 100, synth(2048, shaped): 45, synth(2048, loopback): 60, synth(4096, shaped): 110})
	for _, c := range []struct {
		text    string
		hit     bool
		outcome string
		worst   float64
		of      string
	}{
		{"sooner than eager at 2048 MiB, with", false, "missed", 1000. / 60, "2048 MiB, loopback"},
		{"sooner than CRIU's daemon over eStargz", true, "hit", 1000. / 110, "4096 MiB, 1g-1ms"},
		{"time at 4096 MiB to that at 64 MiB", true, "hit", 1.1, "shaped"},
		{"time until 95 %", false, "not measured", 0, ""},
		{"time of 32 restores", false, "not measured", 0, ""},
		{"touched chunks that were there", false, "not measured", 0, ""},
	} {
		v := verdictOn(t, r, c.text)
		if v.hit != c.hit || v.outcome() != c.outcome || v.worst != c.worst || v.of != c.of {
			t.Errorf("%s: %s with %g (%s), want %s with %g (%s)", c.text, v.outcome(), v.worst, v.of, c.outcome, c.worst, c.of)
		}
	}
}

// TestNoTargetIsHitByNothing: what was not measured is never taken for good.
func TestNoTargetIsHitByNothing(t *testing.T) {
	for _, v := range new(results).judge() {
		if v.known || v.hit {
			t.Errorf("%s: %s with %g", v.text, v.outcome(), v.worst)
		}
	}
}

func TestPlotIsXML(t *testing.T) {
	if svg := measured(map[place]float64{synth(64, shaped): 1}).plot(); svg != "" {
		t.Errorf("a plot of one size: %s", svg)
	}
	r := measured(map[place]float64{synth(64, shaped): 80, synth(2048, shaped): 120, synth(64, loopback): 70, synth(2048, loopback): 90})
	svg := r.plot()
	d := xml.NewDecoder(strings.NewReader(svg))
	circles := 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "circle" {
			circles++
		}
	}
	if want := 2 * 2 * len(variants); circles != want {
		t.Errorf("%d points, %d were measured", circles, want)
	}
}
