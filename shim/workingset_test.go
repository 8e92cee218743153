// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"reflect"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/workingset"
)

func TestRecordingEnds(t *testing.T) {
	start := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		touched func(second int) int
		want    int // seconds
	}{
		"quiet from the beginning": {func(int) int { return 3 }, 15},
		"quiet later":              {func(s int) int { return min(s, 20) }, 35},
		"never quiet":              {func(s int) int { return s }, 60},
		"much":                     {func(s int) int { return 1000 * s }, 9},
	} {
		var r recording
		for s := 0; ; s++ {
			if s > 1000 {
				t.Errorf("%s: it has no end", name)
				break
			}
			if r.done(c.touched(s), start.Add(time.Duration(s)*time.Second)) {
				if s != c.want {
					t.Errorf("%s: it ended after %d s, not %d", name, s, c.want)
				}
				break
			}
		}
	}
}

func TestEncodeSet(t *testing.T) {
	of := digest.FromString("checkpoint")
	touched := make([]pager.Chunk, workingset.MaxChunks+1)
	for i := range touched {
		touched[i] = pager.Chunk{Blob: 1, Chunk: uint32(2 * i)}
	}
	p, err := encodeSet(of.String(), touched, true)
	if err != nil {
		t.Fatal(err)
	}
	set, err := workingset.Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	if set.Checkpoint != of || !set.Partial || len(set.Chunks) != workingset.MaxChunks || !reflect.DeepEqual(set.Chunks[2], workingset.Chunk{Blob: 1, Chunk: 4}) {
		t.Errorf("%s, partial %v, %d chunks", set.Checkpoint, set.Partial, len(set.Chunks))
	}
}
