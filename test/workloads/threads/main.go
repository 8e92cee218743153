// SPDX-License-Identifier: Apache-2.0

// threads has eight operating-system threads, each with 4 MiB of memory of its own that it changes step by step in a way that
// can be computed anew.
//
// GET :8080/state asks each thread to check all of its memory and answers
// {"threads":8,"steps":[...],"ok":true}; steps only ever grow.
// CRIU cannot dump MPTCP sockets, which Go programs listen on by default.
//
//go:debug multipathtcp=0
package main

import (
	"encoding/json"
	"log"
	"net/http"
	"runtime"
	"time"
)

const (
	threads = 8
	words   = 4 << 20 / 8
)

// report is what a thread says about itself.
type report struct {
	steps uint64
	ok    bool
}

// work holds one thread. After step n, word i is (n+words-1-i)/words passes over the memory times the word's own constant.
func work(number uint64, ask <-chan chan<- report) {
	runtime.LockOSThread()
	memory := make([]uint64, words)
	var step uint64
	advance := func(steps int) {
		for range steps {
			i := step % words
			memory[i] += constant(number, i)
			step++
		}
	}
	advance(words) // all of the memory is in use before the first question
	pace := time.NewTicker(10 * time.Millisecond)
	for {
		select {
		case <-pace.C:
			advance(1000)
		case reply := <-ask:
			ok := true
			for i := range uint64(words) {
				passes := (step + words - 1 - i) / words
				ok = ok && memory[i] == passes*constant(number, i)
			}
			reply <- report{step, ok}
		}
	}
}

func constant(number, i uint64) uint64 { return (number*words + i) * 0x9e3779b97f4a7c15 }

func main() {
	var asks [threads]chan chan<- report
	for i := range asks {
		asks[i] = make(chan chan<- report)
		go work(uint64(i), asks[i])
	}
	http.HandleFunc("/state", func(w http.ResponseWriter, _ *http.Request) {
		state := struct {
			Threads int      `json:"threads"`
			Steps   []uint64 `json:"steps"`
			OK      bool     `json:"ok"`
		}{threads, nil, true}
		for _, ask := range asks {
			reply := make(chan report)
			ask <- reply
			r := <-reply
			state.Steps = append(state.Steps, r.steps)
			state.OK = state.OK && r.ok
		}
		_ = json.NewEncoder(w).Encode(state)
	})
	log.Fatal(http.ListenAndServe(":8080", nil))
}
