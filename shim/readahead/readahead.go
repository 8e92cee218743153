// SPDX-License-Identifier: Apache-2.0

// Package readahead predicts which chunks a program is going to miss from those
// that it missed.
//
// A miss costs a round trip to the registry, and a program that walks over memory
// makes one after the other. Such walks have a constant stride: one chunk in a
// scan, more when columns or records are visited; several may be interleaved, by
// threads or by the structure of the data. (Trends in the strides of page faults
// are what Leap prefetches remote memory by: Al Maruf and Chowdhury, "Effectively
// Prefetching Remote Memory with Leap", ATC 2020.)
//
// A stream is found when a miss and two earlier ones lie at equal distances. From
// then on its next chunks are fetched before they are missed. When the first
// chunk behind those is missed, the prediction was right, and twice as many follow:
// the misses of a walk are about the logarithm of its length, and what is fetched
// in vain at its end is no more than twice what was used, and maxWindow at most.
package readahead

const (
	// history is how many misses are remembered to find streams by. Among that
	// few, two that happen to lie at equal distances are rare.
	history = 16
	// streams is how many walks are followed at once.
	streams = 8
	// firstWindow and maxWindow bound the chunks that are fetched ahead (1 MiB and
	// 8 MiB with chunks of 128 KiB).
	firstWindow = 8
	maxWindow   = 64
)

// Predictor predicts the misses in one blob. The zero value is ready for use. It
// must not be used by several goroutines at the same time.
type Predictor struct {
	misses [history]int // a ring; entries are chunk+1, 0 is none
	last   int          // where the newest is
	walks  [streams]walk
	clock  uint64
}

// walk is a stream that was found.
type walk struct {
	stride int // in chunks; 0 is none
	next   int // the first chunk that was not fetched ahead
	window int // chunks that were fetched ahead last
	used   uint64
}

// Miss takes note that a chunk was missed, and returns the chunks, of a blob with
// n of them, that are likely to be missed next; none as a rule.
func (p *Predictor) Miss(chunk, n int) []int {
	p.clock++
	w := p.following(chunk)
	if w == nil {
		w = p.find(chunk)
	}
	p.last = (p.last + 1) % history
	p.misses[p.last] = chunk + 1
	if w == nil {
		return nil
	}
	w.used = p.clock
	var ahead []int
	for w.next = chunk + w.stride; len(ahead) < w.window && w.next >= 0 && w.next < n; w.next += w.stride {
		ahead = append(ahead, w.next)
	}
	return ahead
}

// following returns the stream that was expected to miss this chunk.
func (p *Predictor) following(chunk int) *walk {
	for i := range p.walks {
		w := &p.walks[i]
		if w.stride != 0 && w.next == chunk {
			w.window = min(2*w.window, maxWindow)
			return w
		}
	}
	return nil
}

// find looks for a new stream that ends in this chunk, the one with the smallest
// stride if there are several.
func (p *Predictor) find(chunk int) *walk {
	stride := 0
	for _, m := range p.misses {
		d := chunk - (m - 1)
		if m == 0 || d == 0 || stride != 0 && abs(d) >= abs(stride) {
			continue
		}
		if p.missed(chunk - 2*d) {
			stride = d
		}
	}
	if stride == 0 {
		return nil
	}
	oldest := &p.walks[0]
	for i := range p.walks {
		if p.walks[i].used < oldest.used {
			oldest = &p.walks[i]
		}
	}
	*oldest = walk{stride: stride, window: firstWindow}
	return oldest
}

func (p *Predictor) missed(chunk int) bool {
	for _, m := range p.misses {
		if m == chunk+1 && m != 0 {
			return true
		}
	}
	return false
}

func abs(n int) int {
	if n < 0 {
		return -n
	}
	return n
}
