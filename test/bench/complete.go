// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"thaw.dev/thaw/test/stack"
)

// completeRuns is how often the filling of memory is measured.
const completeRuns = 3

// Names of measurements.
const (
	resident95     = "95% resident"     // after the request to start
	fillRate       = "rate of the fill" // bytes of memory a second, from the first reply on
	fillCPU        = "processor time"   // of daemon and shim for a GB of memory, restore included
	completeUnit   = "s"
	completePolicy = "complete"
)

// complete measures how long thaw takes to fill all memory under the policy complete, cold and with a published working set.
func (b *bench) complete(ctx context.Context, l *lane) error {
	began := time.Now()
	for run := range min(b.runs, completeRuns) {
		if time.Since(began) > enough && run >= fewRuns {
			break
		}
		ctx, cancel := context.WithTimeout(ctx, trialTimeout)
		err := b.completeOnce(ctx, l, run)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) completeOnce(ctx context.Context, l *lane, run int) error {
	if err := l.s.ClearThawCache(ctx); err != nil {
		return err
	}
	t := &trial{row: &row{}, registry: b.s.Registry}
	o := stack.ContainerOptions{Image: l.published(l.registry), Annotations: map[string]string{"thaw.dev/policy": completePolicy}}
	return l.pod(ctx, t, thaw, o, func(c *stack.Container) error {
		replied := time.Now()
		pid, err := c.PID(ctx)
		if err != nil {
			return err
		}
		memory := int64(l.mib) << 20
		if err := awaitResident(ctx, pid, memory*95/100); err != nil {
			return err
		}
		most := time.Since(t.began)
		// What the program has besides its memory, some MiB, makes up for the few pages that may lack.
		if err := awaitResident(ctx, pid, memory); err != nil {
			return err
		}
		took := time.Since(replied)
		// Both were idle before: the pod had only its sandbox, the daemon had just started.
		shim, err := c.Pod.ShimPID()
		if err != nil {
			return err
		}
		var cpu time.Duration
		for _, p := range []int{shim, b.s.Daemon().PID()} {
			used, err := cpuTime(p)
			if err != nil {
				return err
			}
			cpu += used
		}
		m := measure{System: thaw, Workload: l.workload, MemoryMiB: l.mib, Link: l.link, Run: run}
		m.Name, m.Value, m.Unit = resident95, most.Seconds(), completeUnit
		b.add(m)
		m.Name, m.Value, m.Unit = fillRate, float64(memory)/took.Seconds()/1e6, "MB/s"
		b.add(m)
		m.Name, m.Value, m.Unit = fillCPU, cpu.Seconds()/(float64(memory)/1e9), "s/GB"
		b.add(m)
		return nil
	})
}

// awaitResident waits until a process has so many bytes in memory.
func awaitResident(ctx context.Context, pid int, bytes int64) error {
	pace := time.NewTicker(5 * time.Millisecond)
	defer pace.Stop()
	for {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if err != nil {
			return err
		}
		fields := strings.Fields(string(text))
		pages, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			return err
		}
		if pages*int64(os.Getpagesize()) >= bytes {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d bytes resident: %w", pages*int64(os.Getpagesize()), bytes, ctx.Err())
		case <-pace.C:
		}
	}
}

// ticks is how many a second /proc/PID/stat counts (USER_HZ): 100 on all of Linux's architectures that containerd runs on.
const ticks = 100

// cpuTime is the processor time that a process has used.
func cpuTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name before may hold anything, blanks too; utime and stime are the 14th and 15th field.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var sum int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return time.Duration(sum) * time.Second / ticks, nil
}
