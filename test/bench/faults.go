// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
)

// faultsMiB is the size of the synthetic server whose single faults are measured.
const faultsMiB = 512

// faultThreads fault at once: alone, and with seven others.
var faultThreads = []int{1, 8}

func faultName(quantile, threads int) string {
	return fmt.Sprintf("p%d of a fault, %d threads", quantile, threads)
}

// faults measures how long the program itself waits for single pages that are on the node: by thaw from the page store, by CRIU's own
// daemon from local files.
func (b *bench) faults(ctx context.Context, l *lane) error {
	if err := l.fillStore(ctx); err != nil {
		return fmt.Errorf("fill the page store: %w", err)
	}
	for run := range b.runs {
		for _, s := range []struct {
			name    string
			restore func(context.Context, func(ip string) error) error
		}{
			{thaw, l.lazily},
			{criuLocal, l.lazilyByCRIU},
		} {
			if !b.wants(s.name) {
				continue
			}
			ctx, cancel := context.WithTimeout(ctx, trialTimeout)
			err := s.restore(ctx, func(ip string) error { return b.timeFaults(ctx, l, s.name, ip, run) })
			cancel()
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	return nil
}

// fillStore has all memory of a restored server read, so that all of it is on the node.
func (l *lane) fillStore(ctx context.Context) error {
	return l.lazily(ctx, func(ip string) error {
		_, err := stack.FirstReply(ctx, "http://"+ip+":8080/verify")
		return err
	})
}

func (l *lane) lazily(ctx context.Context, use func(ip string) error) error {
	o := stack.ContainerOptions{Image: l.plain(l.registry), Annotations: map[string]string{"thaw.dev/policy": "lazy"}}
	return l.pod(ctx, &trial{row: &row{}, registry: l.s.Registry}, thaw, o, func(c *stack.Container) error { return use(c.Pod.IP) })
}

func (l *lane) lazilyByCRIU(ctx context.Context, use func(ip string) error) error {
	return l.bundle(ctx, func(b *baseline.Bundle) error {
		if err := b.Link(l.images); err != nil {
			return err
		}
		if err := b.Restore(ctx, true); err != nil {
			return err
		}
		if err := l.ask(ctx, b.Pod.IP, false); err != nil {
			return err
		}
		return use(b.Pod.IP)
	})
}

func (b *bench) timeFaults(ctx context.Context, l *lane, system, ip string, run int) error {
	for part, threads := range faultThreads {
		text, err := stack.FirstReply(ctx, fmt.Sprintf("http://%s:8080/faults?threads=%d&part=%d", ip, threads, part))
		if err != nil {
			return err
		}
		var reply struct {
			WaitNS []int64 `json:"wait_ns"`
		}
		if err := json.Unmarshal(text, &reply); err != nil {
			return err
		}
		n := len(reply.WaitNS)
		if n == 0 {
			// CRIU's daemon copies all memory by and by: it may be done.
			fmt.Fprintf(os.Stderr, "%s: no page lacked any more\n", system)
			continue
		}
		for _, q := range []int{50, 99} {
			b.add(measure{
				Name: faultName(q, threads), System: system, Workload: l.workload, MemoryMiB: l.mib, Link: l.link, Run: run,
				Value: float64(reply.WaitNS[(n-1)*q/100]) / 1000, Unit: fmt.Sprintf("µs (%d faults)", n),
			})
		}
	}
	return nil
}
