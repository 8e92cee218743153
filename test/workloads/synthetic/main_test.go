// SPDX-License-Identifier: Apache-2.0

package main

import (
	"syscall"
	"testing"
)

func TestEachWrongPageIsFound(t *testing.T) {
	memory := make([]byte, 2*run*share)
	for page := range len(memory) / pageSize {
		fill(memory[page*pageSize:(page+1)*pageSize], uint64(page))
	}
	v := make(versions, len(memory)/pageSize)
	if checked, wrong := checkSpread(memory, v); wrong != -1 || checked != len(memory)/share {
		t.Errorf("untouched memory: %d bytes checked, wrong at %d", checked, wrong)
	}
	at := run * share
	clear(memory[at : at+pageSize])
	if _, wrong := checkSpread(memory, v); wrong != at {
		t.Errorf("a zero page at %d was seen at %d", at, wrong)
	}
	if wrong := checkRange(memory, v, 0, len(memory)); wrong != at {
		t.Errorf("a zero page at %d was seen at %d", at, wrong)
	}
	copy(memory[at:at+pageSize], memory[:pageSize])
	if wrong := checkRange(memory, v, 0, len(memory)); wrong != at {
		t.Errorf("another page's content at %d was seen at %d", at, wrong)
	}
	fill(memory[at:at+pageSize], uint64(at/pageSize))
	for round := range uint64(20) {
		if changed := v.change(memory, round); changed < len(memory)/8-pageSize {
			t.Errorf("%d bytes changed", changed)
		}
	}
	if wrong := checkRange(memory, v, 0, len(memory)); wrong != -1 {
		t.Errorf("changed memory is wrong at %d", wrong)
	}
	for page := range v {
		if v[page] > 0 {
			fill(memory[page*pageSize:(page+1)*pageSize], uint64(page)) // as at the beginning
			if wrong := checkRange(memory, v, 0, len(memory)); wrong != page*pageSize {
				t.Errorf("the old content at %d was seen at %d", page*pageSize, wrong)
			}
			break
		}
	}
}

func TestFaultsAreTimedOnce(t *testing.T) {
	memory, err := syscall.Mmap(-1, 0, 16*apart, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := faults(memory, 2, 0); err == nil {
		t.Error("pages that were never filled passed for right")
	}
	at := apart/2 + apart // the first page of part 1
	fill(memory[at:at+pageSize], uint64(at/pageSize))
	if waits, err := faults(memory[:2*apart], 1, 1); err != nil || len(waits) != 0 {
		t.Errorf("%v, %v of a page that was there", waits, err)
	}
}
