// SPDX-License-Identifier: Apache-2.0

// Package readahead predicts which chunks a program is going to touch from those
// that it touched.
//
// A chunk that is not on the node costs a round trip to the registry, and a program
// that walks over memory makes one after the other. Such walks have a constant
// stride: one chunk in a scan, more when columns or records are visited; several may
// be interleaved, by threads or by the structure of the data. (Trends in the strides
// of page faults are what Leap prefetches remote memory by: Al Maruf and Chowdhury,
// "Effectively Prefetching Remote Memory with Leap", ATC 2020.)
//
// A walk is found when a touch and two earlier ones lie at equal distances. From
// then on its next chunks are asked for before they are touched: the more the longer
// the walk has been, and again when half of what was asked for last has been
// touched, so that a program that keeps its pace never waits. Walks with the same
// stride side by side, as over records of several chunks, are asked for
// together: what lies beside each other can be fetched at once.
package readahead

const (
	// history is how many touches are remembered to find walks by. Among that
	// few, two that happen to lie at equal distances are rare.
	history = 16
	// walks is how many are followed at once.
	walks = 8
	// firstWindow and maxWindow bound the chunks that are asked for at once (512 KiB
	// and 8 MiB with chunks of 128 KiB). Small heaps are touched in an order that
	// is full of short walks by chance: the first window is all that these cost.
	firstWindow = 4
	maxWindow   = 64
	// growth is how much larger each window of a walk is than the one before. It divides firstWindow.
	growth = 4
)

// Predictor predicts the touches of one blob. The zero value is ready for use. It
// must not be used by several goroutines at the same time.
type Predictor struct {
	touched [history]int // a ring; entries are chunk+1, 0 is none
	last    int          // where the newest is
	walks   [walks]walk
	clock   uint64
}

// walk is a series of touches at equal distances.
type walk struct {
	stride int // in chunks; 0 is none
	at     int // touched last
	end    int // the first chunk that was not asked for
	window int // chunks that were asked for last
	seen   int // touches since then
	used   uint64
}

// Touch takes note that a chunk was touched for the first time, and returns the
// chunks, of a blob with n of them, that are likely to be touched next and were not
// returned for this walk before; none as a rule.
func (p *Predictor) Touch(chunk, n int) []int {
	p.clock++
	w := p.following(chunk)
	if w == nil {
		w = p.find(chunk)
		p.last = (p.last + 1) % history
		p.touched[p.last] = chunk + 1
	}
	if w == nil {
		return nil
	}
	w.at, w.used = chunk, p.clock
	w.seen++
	if w.asked() > w.window/2 || w.seen < w.window/2 {
		return nil
	}
	w.window = min(growth*w.window, maxWindow)
	want := w.asked() + w.window
	var ahead []int
	for i := range p.walks {
		if v := &p.walks[i]; v.beside(w) {
			v.window, v.seen = w.window, 0
			ahead = v.extend(ahead, want, n)
		}
	}
	return ahead
}

// asked is how many chunks were asked for that were not touched.
func (w *walk) asked() int { return (w.end-w.at)/w.stride - 1 }

// beside tells whether a walk goes along with another one, which goes along with
// itself.
func (w *walk) beside(v *walk) bool {
	return w.stride == v.stride && abs(w.at-v.at) <= abs(v.stride)
}

// extend asks for so many chunks in all.
func (w *walk) extend(ahead []int, want, n int) []int {
	for ; w.asked() < want && w.end >= 0 && w.end < n; w.end += w.stride {
		ahead = append(ahead, w.end)
	}
	return ahead
}

// following returns the walk that was expected to come to this chunk.
func (p *Predictor) following(chunk int) *walk {
	for i := range p.walks {
		w := &p.walks[i]
		if w.stride == 0 || (chunk-w.at)%w.stride != 0 {
			continue
		}
		if steps := (chunk - w.at) / w.stride; steps > 0 && steps <= w.asked()+1 {
			return w
		}
	}
	return nil
}

// find looks for a new walk that ends in this chunk, the one with the smallest
// stride if there are several.
func (p *Predictor) find(chunk int) *walk {
	stride := 0
	for _, m := range p.touched {
		d := chunk - (m - 1)
		if m == 0 || d == 0 || stride != 0 && abs(d) >= abs(stride) {
			continue
		}
		if p.remembered(chunk - 2*d) {
			stride = d
		}
	}
	if stride == 0 {
		return nil
	}
	// What goes along with it has made one step less so far.
	for _, m := range p.touched {
		if at := m - 1; m != 0 && at != chunk && abs(at+stride-chunk) < abs(stride) && at != chunk-stride && p.remembered(at-stride) {
			p.begin(stride, at)
		}
	}
	return p.begin(stride, chunk)
}

// begin makes a walk, in the place of the one that was not followed for the longest
// time.
func (p *Predictor) begin(stride, at int) *walk {
	w := &p.walks[0]
	for i := range p.walks {
		if p.walks[i].used < w.used {
			w = &p.walks[i]
		}
	}
	*w = walk{stride: stride, at: at, end: at + stride, window: firstWindow / growth, seen: firstWindow, used: p.clock}
	return w
}

func (p *Predictor) remembered(chunk int) bool {
	for _, m := range p.touched {
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
