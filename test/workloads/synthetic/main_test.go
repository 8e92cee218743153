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
