// SPDX-License-Identifier: Apache-2.0

// synthetic is the benchmarks' server: a given amount of incompressible private anonymous memory of which each page can be
// checked, and little else.
//
// Environment: MEMORY_MIB is the amount, 64 if unset. It listens on :8080:
//
//	GET /touch   checks 1 % of the memory, in runs of 256 KiB spread evenly, always the same
//	GET /verify  checks all of it
//	GET /change  gives an eighth of the pages, others each time, a new content that is checked from then on
//	GET /faults?threads=N&part=P  times the first touch of single pages, see faults
//
// The first three answer {"ok":true,"bytes":N,"requests":M}, where M counts the requests so far, or status 500 with the first wrong
// address.
// CRIU cannot dump MPTCP sockets, which Go programs listen on by default.
//
//go:debug multipathtcp=0
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
)

const (
	pageSize = 4096
	// run is how much is touched in one place.
	run = 256 << 10
	// share is what part of the memory a touch checks: one in share.
	share = 100
)

// fill writes the page with the given number.
func fill(page []byte, number uint64) {
	x := seed(number)
	for i := 0; i < len(page); i += 8 {
		x = next(x)
		binary.LittleEndian.PutUint64(page[i:], x)
	}
}

// check says whether the page still holds what fill wrote.
func check(page []byte, number uint64) bool {
	x := seed(number)
	for i := 0; i < len(page); i += 8 {
		x = next(x)
		if binary.LittleEndian.Uint64(page[i:]) != x {
			return false
		}
	}
	return true
}

// seed gives each page a start of its own that is never 0 (splitmix64's increment and finaliser).
func seed(number uint64) uint64 {
	z := (number + 1) * 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	return z ^ z>>27 | 1
}

// next is xorshift64.
func next(x uint64) uint64 {
	x ^= x << 13
	x ^= x >> 7
	return x ^ x<<17
}

// versions says how often each page was changed.
type versions []uint32

// number is what fill and check take for a page.
func (v versions) number(page int) uint64 { return uint64(v[page])<<32 | uint64(page) }

// change writes new content to one in eight pages, without reading it before; which ones depends on the round.
func (v versions) change(memory []byte, round uint64) (changed int) {
	first := int(seed(round) % 8)
	for page := first; page < len(v); page += 8 {
		v[page]++
		fill(memory[page*pageSize:(page+1)*pageSize], v.number(page))
		changed += pageSize
	}
	return changed
}

// checkRange checks the pages from offset on and gives the first wrong offset, or -1.
func checkRange(memory []byte, v versions, offset, length int) int {
	for at := offset; at < offset+length; at += pageSize {
		if !check(memory[at:at+pageSize], v.number(at/pageSize)) {
			return at
		}
	}
	return -1
}

// checkSpread checks one in share of the memory and gives how many bytes that was and the first wrong offset, or -1.
func checkSpread(memory []byte, v versions) (checked, wrong int) {
	stride := run * share
	for at := 0; at+run <= len(memory); at += stride {
		if wrong := checkRange(memory, v, at, run); wrong >= 0 {
			return checked, wrong
		}
		checked += run
	}
	return checked, -1
}

func main() {
	mib := 64
	if v := os.Getenv("MEMORY_MIB"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 1<<20 {
			log.Fatalf("MEMORY_MIB is %q: a number of MiB is needed", v)
		}
		mib = n
	}
	// Outside of Go's heap, so that the garbage collector never looks at it.
	memory, err := syscall.Mmap(-1, 0, mib<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		log.Fatalf("map %d MiB: %v", mib, err)
	}
	const workers = 2
	var filling sync.WaitGroup
	for w := range workers {
		filling.Go(func() {
			for page := w; page < len(memory)/pageSize; page += workers {
				fill(memory[page*pageSize:(page+1)*pageSize], uint64(page))
			}
		})
	}
	filling.Wait()

	changes := make(versions, len(memory)/pageSize)
	var access sync.RWMutex // to the memory, for changes
	var requests atomic.Int64
	answer := func(w http.ResponseWriter, checked, wrong int) {
		n := requests.Add(1)
		if wrong >= 0 {
			http.Error(w, fmt.Sprintf(`{"ok":false,"wrong":%d,"requests":%d}`, wrong, n), http.StatusInternalServerError)
			return
		}
		fmt.Fprintf(w, `{"ok":true,"bytes":%d,"requests":%d}`+"\n", checked, n)
	}
	http.HandleFunc("/touch", func(w http.ResponseWriter, _ *http.Request) {
		access.RLock()
		checked, wrong := checkSpread(memory, changes)
		access.RUnlock()
		answer(w, checked, wrong)
	})
	http.HandleFunc("/verify", func(w http.ResponseWriter, _ *http.Request) {
		access.RLock()
		wrong := checkRange(memory, changes, 0, len(memory))
		access.RUnlock()
		answer(w, len(memory), wrong)
	})
	http.HandleFunc("/change", func(w http.ResponseWriter, _ *http.Request) {
		access.Lock()
		changed := changes.change(memory, uint64(requests.Load()))
		access.Unlock()
		answer(w, changed, -1)
	})
	http.HandleFunc("/faults", func(w http.ResponseWriter, r *http.Request) {
		threads, err1 := strconv.Atoi(r.FormValue("threads"))
		part, err2 := strconv.Atoi(r.FormValue("part"))
		if err1 != nil || err2 != nil || threads < 1 || threads > 64 {
			http.Error(w, "threads and part are needed", http.StatusBadRequest)
			return
		}
		waits, err := faults(memory, threads, part)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		if err := json.NewEncoder(w).Encode(map[string]any{"ok": true, "wait_ns": waits}); err != nil {
			log.Print(err)
		}
	})
	log.Fatal(http.ListenAndServe(":8080", nil))
}
