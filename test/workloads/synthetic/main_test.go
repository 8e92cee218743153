// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestEachWrongPageIsFound(t *testing.T) {
	memory := make([]byte, 2*run*share)
	for page := range len(memory) / pageSize {
		fill(memory[page*pageSize:(page+1)*pageSize], uint64(page))
	}
	if checked, wrong := checkSpread(memory); wrong != -1 || checked != len(memory)/share {
		t.Errorf("untouched memory: %d bytes checked, wrong at %d", checked, wrong)
	}
	at := run * share
	clear(memory[at : at+pageSize])
	if _, wrong := checkSpread(memory); wrong != at {
		t.Errorf("a zero page at %d was seen at %d", at, wrong)
	}
	if wrong := checkRange(memory, 0, len(memory)); wrong != at {
		t.Errorf("a zero page at %d was seen at %d", at, wrong)
	}
	copy(memory[at:at+pageSize], memory[:pageSize])
	if wrong := checkRange(memory, 0, len(memory)); wrong != at {
		t.Errorf("another page's content at %d was seen at %d", at, wrong)
	}
}
