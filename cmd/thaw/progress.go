// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"thaw.dev/thaw/snapshotter/publish"
)

// progress shows on a terminal how far a command is, and nothing elsewhere.
type progress struct {
	w   io.Writer // nil when nothing is shown
	bar *progressbar.ProgressBar
}

func newProgress(w io.Writer, quiet bool) *progress {
	f, ok := w.(*os.File)
	if quiet || !ok || !term.IsTerminal(int(f.Fd())) {
		return &progress{}
	}
	return &progress{w: w}
}

// step says what happens now.
func (p *progress) step(format string, args ...any) {
	if p.w != nil {
		fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// published is a publish.Target's Progress.
func (p *progress) published(now publish.Progress) {
	if p.w == nil {
		return
	}
	if p.bar == nil {
		p.bar = progressbar.NewOptions64(max(now.MemoryTotal, 1),
			progressbar.OptionSetWriter(p.w), progressbar.OptionShowBytes(true), progressbar.OptionUseIECUnits(true),
			progressbar.OptionSetDescription("memory"), progressbar.OptionSetWidth(30), progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish(), progressbar.OptionFullWidth())
	}
	p.bar.Describe("memory, " + size(now.Uploaded) + " sent")
	_ = p.bar.Set64(min(now.Memory, now.MemoryTotal)) // a bar that cannot be drawn is no failure
}

func (p *progress) done() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}

// size is a number of bytes for people.
func size(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, prefix := float64(n)/unit, 0
	for v >= 999.5 && prefix < 4 {
		v /= unit
		prefix++
	}
	if v < 9.95 {
		return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[prefix])
	}
	return fmt.Sprintf("%.0f %ciB", v, "KMGTP"[prefix])
}
