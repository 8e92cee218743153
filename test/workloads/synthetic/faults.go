// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"
)

const (
	// apart is how far pages are from each other whose first touch is timed: further than any system fills around a fault.
	apart = 256 << 10
	// present is the bit of /proc/PID/pagemap that says that a page is in memory.
	present = 1 << 63
)

// faults touches single pages from several threads at once and gives how long each first touch took, in nanoseconds and ascending.
// Pages that are there already are left out. part 0 and 1 touch different pages.
func faults(memory []byte, threads, part int) ([]int64, error) {
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, err
	}
	defer pagemap.Close()
	base := uintptr(unsafe.Pointer(unsafe.SliceData(memory)))

	// A thread that waits for a page holds one of these.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(threads + 1))
	waits := make([][]int64, threads)
	errs := make([]error, threads)
	var running sync.WaitGroup
	for t := range threads {
		running.Go(func() {
			entry := make([]byte, 8)
			// In the middle, where no spread touch reaches: those begin at multiples of a run.
			for at := (2*t+part)*apart + apart/2; at+pageSize <= len(memory); at += 2 * threads * apart {
				if _, err := pagemap.ReadAt(entry, int64((base+uintptr(at))/pageSize*8)); err != nil {
					errs[t] = err
					return
				}
				if binary.NativeEndian.Uint64(entry)&present != 0 {
					continue
				}
				page := memory[at : at+pageSize]
				began := time.Now()
				first := page[0]
				wait := time.Since(began)
				runtime.KeepAlive(first)
				if !check(page, uint64(at/pageSize)) {
					errs[t] = fmt.Errorf("wrong page at %d", at)
					return
				}
				waits[t] = append(waits[t], wait.Nanoseconds())
			}
		})
	}
	running.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	all := slices.Concat(waits...)
	slices.Sort(all)
	return all, nil
}
