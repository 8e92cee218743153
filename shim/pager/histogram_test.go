// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"testing"
	"time"
)

func TestHistogram(t *testing.T) {
	var h histogram
	if h.quantile(0.5) != 0 {
		t.Error("empty histogram has a median")
	}
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Microsecond)
	}
	h.add(-1)
	for _, c := range []struct {
		q    float64
		want time.Duration
	}{{0.5, 500 * time.Microsecond}, {0.99, 990 * time.Microsecond}, {1, time.Millisecond}} {
		got := h.quantile(c.q)
		if got < c.want || got > c.want+c.want/7 {
			t.Errorf("quantile %v is %v, want about %v", c.q, got, c.want)
		}
	}
	for v := uint64(1); v < 1<<62; v = v*3/2 + 1 {
		if u := upper(bucket(v)); uint64(u) < v || v > 16 && uint64(u) > v+v/8 {
			t.Errorf("%d is in the bucket up to %d", v, u)
		}
	}
}
