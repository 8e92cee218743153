// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

const (
	// trialTimeout bounds one trial with all that belongs to it.
	trialTimeout = 5 * time.Minute
	// A system that has taken so much time at a subject, with all that belongs to its trials, has no more than fewRuns there: the time
	// goes to those that differ by milliseconds.
	enough  = time.Minute
	fewRuns = 2
	// tries is how often a system may fail at a subject before it is left out there.
	tries = 2
)

// restores measures the first reply of all systems, which take turns so that drift of the machine meets all alike.
func (b *bench) restores(ctx context.Context, l *lane) error {
	systems := slices.DeleteFunc(l.own(), func(s system) bool {
		return !b.wants(s.name) || s.name == coldStart && l.link != loopback // which fetches nothing
	})
	for _, p := range peers {
		if !b.wants(p.name) {
			continue
		}
		made, err := p.new(ctx, b.s, l.forPeers())
		if err != nil {
			b.fail(fmt.Errorf("%s of %s: prepare: %w", p.name, l.name(), err))
			continue
		}
		defer func() {
			if err := made.Close(context.WithoutCancel(ctx)); err != nil {
				b.fail(fmt.Errorf("%s of %s: %w", p.name, l.name(), err))
			}
		}()
		systems = append(systems, l.peer(p.name, made))
	}
	failed := make([]int, len(systems))
	spent := make([]time.Duration, len(systems))
	for run := range b.runs {
		for i, s := range systems {
			if failed[i] == tries || spent[i] > enough && run >= fewRuns {
				continue
			}
			began := time.Now()
			r := b.trial(ctx, l, s, run)
			spent[i] += time.Since(began)
			if !r.OK {
				failed[i]++
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
	}
	return nil
}

func (b *bench) trial(ctx context.Context, l *lane, s system, run int) row {
	r := row{
		System: s.name, Workload: l.workload, MemoryMiB: l.mib, Link: l.link, Cache: s.cache, WorkingSet: s.workingSet,
		Clones: 1, Run: run,
	}
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	err := s.measure(ctx, &trial{row: &r, registry: b.s.Registry})
	b.keep(r, err)
	return b.rows[len(b.rows)-1]
}

// keep keeps a row and shows it.
func (b *bench) keep(r row, err error) {
	if r.OK = err == nil; !r.OK {
		r.Error = strings.Join(strings.Fields(err.Error()), " ") // tools of others write many lines
		b.fail(fmt.Errorf("%s (%s) of %s at %d MiB over %s, run %d: %w", r.System, r.cacheName(), r.Workload, r.MemoryMiB, r.Link, r.Run, err))
	}
	fmt.Fprintf(os.Stderr, "%-9s %5d MiB  %-8s  run %d  %-12s %-8s  %8.1f ms  %11d bytes  %5d requests  %4d remote faults  %s\n",
		r.Workload, r.MemoryMiB, r.Link, r.Run, r.System, r.cacheName(), r.TTFR, r.BytesFetched, r.Requests, r.RemoteFaults, r.Error)
	b.rows = append(b.rows, r)
}

// fail notes what went wrong; the rest is measured all the same.
func (b *bench) fail(err error) { b.failed = errors.Join(b.failed, err) }
