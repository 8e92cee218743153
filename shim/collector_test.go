// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"runtime/debug"
	"testing"
)

// settings are the collector's: both are read by being set.
func settings() (percent int, limit int64) {
	percent = debug.SetGCPercent(-1)
	debug.SetGCPercent(percent)
	return percent, debug.SetMemoryLimit(-1)
}

// TestCollector: it rests until the last of those who paused it, each counted once, lets it run as before.
func TestCollector(t *testing.T) {
	percent, limit := settings()
	var c collector
	first, second := c.pause(), c.pause()
	check := func(when string, wantPercent int, wantLimit int64) {
		t.Helper()
		if p, l := settings(); p != wantPercent || l != wantLimit {
			t.Errorf("%s: %d %%, limit %d; want %d %%, %d", when, p, l, wantPercent, wantLimit)
		}
	}
	check("paused", -1, uncollected)
	first()
	first()
	check("once more", -1, uncollected)
	second()
	check("resumed", percent, limit)
}
