// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"runtime/debug"
	"sync"
)

// uncollected is how much memory the shim may take while its garbage is not collected, in bytes.
const uncollected = 64 << 20

// collector is Go's garbage collector. Containerd's shims collect whenever their memory has grown by 40 %: a restore makes a few
// megabytes of garbage, and would wait for its collection several times.
type collector struct {
	mu      sync.Mutex
	paused  int // restores that want it so
	percent int // before
	limit   int64
}

// pause keeps the collector from running while the shim is small. It runs again when each of those who paused it has called
// resume, which may be called more than once.
func (c *collector) pause() (resume func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused++; c.paused == 1 {
		c.limit = debug.SetMemoryLimit(uncollected)
		c.percent = debug.SetGCPercent(-1)
	}
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.paused--; c.paused == 0 {
			debug.SetGCPercent(c.percent)
			debug.SetMemoryLimit(c.limit)
		}
	})
}
