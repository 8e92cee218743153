// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// subBuckets is the number of buckets for each power of two: values are kept
// with an error of at most one eighth.
const subBuckets = 8

// histogram counts durations in constant memory. It may be read while it is
// written.
type histogram struct {
	counts [64 * subBuckets]atomic.Uint64
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucket(uint64(max(d, 1)))].Add(1)
}

// bucket returns the bucket of v > 0.
func bucket(v uint64) int {
	exp := bits.Len64(v) - 1
	sub := v << (63 - exp) >> 60 & (subBuckets - 1) // the three bits below the highest
	return exp*subBuckets + int(sub)
}

// upper returns the largest value of a bucket.
func upper(i int) time.Duration {
	exp, sub := i/subBuckets, uint64(i%subBuckets)
	if exp < 3 {
		return time.Duration(1<<(exp+1) - 1)
	}
	return time.Duration((subBuckets+sub+1)<<(exp-3) - 1)
}

// quantile returns the duration that a fraction q of all values do not exceed,
// rounded up to the end of its bucket; 0 if there are no values.
func (h *histogram) quantile(q float64) time.Duration {
	var counts [len(h.counts)]uint64
	total := uint64(0)
	for i := range counts {
		counts[i] = h.counts[i].Load()
		total += counts[i]
	}
	if total == 0 {
		return 0
	}
	rank := uint64(q * float64(total-1))
	for i, n := range counts {
		if rank < n {
			return upper(i)
		}
		rank -= n
	}
	return upper(len(counts) - 1)
}
