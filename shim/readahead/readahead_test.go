// SPDX-License-Identifier: Apache-2.0

package readahead

import (
	"math/rand"
	"testing"
)

// walkOver touches chunks in order and returns how many were not asked for before and how many were asked for but not touched.
func walkOver(chunks []int, n int) (misses, wasted int) {
	var p Predictor
	present := make(map[int]bool)
	touched := make(map[int]bool)
	for _, c := range chunks {
		if touched[c] {
			continue
		}
		touched[c] = true
		if !present[c] {
			misses++
			present[c] = true
		}
		for _, a := range p.Touch(c, n) {
			present[a] = true
		}
	}
	for c := range present {
		if !touched[c] {
			wasted++
		}
	}
	return misses, wasted
}

func every(first, stride, count int) []int {
	var out []int
	for i := range count {
		out = append(out, first+i*stride)
	}
	return out
}

func TestWalks(t *testing.T) {
	const n = 100000
	interleaved := []int{}
	a, b := every(10, 7, 300), every(50001, 7, 300)
	for i := range a {
		interleaved = append(interleaved, a[i], b[i])
	}
	pairs := []int{}
	for _, c := range every(5, 50, 300) {
		pairs = append(pairs, c, c+1)
	}
	for name, tc := range map[string]struct {
		chunks         []int
		misses, wasted int // at most
	}{
		"scan":        {every(0, 1, 300), 3, 2 * maxWindow},
		"backwards":   {every(5000, -1, 300), 3, 2 * maxWindow},
		"stride":      {every(3, 50, 300), 3, 2 * maxWindow},
		"interleaved": {interleaved, 6, 4 * maxWindow},
		"pairs":       {pairs, 5, 4 * maxWindow},
		"short":       {every(3, 50, 3), 3, firstWindow},
		"two":         {every(3, 50, 2), 2, 0},
		"same":        {[]int{4, 4, 4}, 1, 0},
	} {
		misses, wasted := walkOver(tc.chunks, n)
		if misses > tc.misses || wasted > tc.wasted {
			t.Errorf("%s: %d misses for %d chunks, %d fetched in vain", name, misses, len(tc.chunks), wasted)
		}
	}
}

// TestRandomTouchesCostLittle: where there is no walk, little is fetched in vain.
func TestRandomTouchesCostLittle(t *testing.T) {
	const n, touches = 16384, 1000
	r := rand.New(rand.NewSource(1))
	var chunks []int
	for range touches {
		chunks = append(chunks, r.Intn(n))
	}
	if _, wasted := walkOver(chunks, n); wasted > touches/5 {
		t.Errorf("%d chunks fetched in vain for %d random ones", wasted, touches)
	}
}

// TestDenseTouchesCostLittle: chunks of a small heap in random order make walks by chance.
func TestDenseTouchesCostLittle(t *testing.T) {
	const runs, heap, touches = 300, 40, 15
	r := rand.New(rand.NewSource(3))
	wasted := 0
	for range runs {
		_, w := walkOver(r.Perm(heap)[:touches], 512)
		wasted += w
	}
	if wasted > runs*touches*5/4 {
		t.Errorf("%d chunks fetched in vain for %d", wasted, runs*touches)
	}
}

// TestWithinTheBlob: nothing outside of the blob is predicted, whatever is missed.
func TestWithinTheBlob(t *testing.T) {
	const n = 20
	r := rand.New(rand.NewSource(2))
	var p Predictor
	for range 10000 {
		for _, c := range p.Touch(r.Intn(n), n) {
			if c < 0 || c >= n {
				t.Fatalf("chunk %d of %d", c, n)
			}
		}
	}
}

// TestWindowsGrow: a long walk is asked for in few pieces, each of which costs a request.
func TestWindowsGrow(t *testing.T) {
	const length, most = 300, 12
	var p Predictor
	asks := 0
	for _, c := range every(0, 1, length) {
		if len(p.Touch(c, length)) > 0 {
			asks++
		}
	}
	if asks == 0 || asks > most {
		t.Errorf("%d pieces for %d chunks, want 1 to %d", asks, length, most)
	}
}
