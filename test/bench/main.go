// SPDX-License-Identifier: Apache-2.0

//go:build linux

// bench measures restores side by side and writes build/bench: results.json (a row for each first reply), measures.json (what else
// was measured), results.md (tables, and which targets were hit) and ttfr.svg.
//
// Systems, alternating in one run so that drift of the machine meets all alike:
//
//	thaw          a pod of the handler thaw; cache cold (nothing of the checkpoint on the node), with or without a working set
//	              that was published beside the image, or warm
//	eager         download all, unpack, runc restore
//	podman        Podman restoring the same state from a checkpoint image of its own in the same registry
//	estargz-criu  runc restore with CRIU's own lazy-pages daemon, images in an eStargz layer mounted by stargz-snapshotter
//	criu-local    runc restore with CRIU's own lazy-pages daemon, images on the local disk: the floor
//	cold          an ordinary start of the program
//
// ttfr_ms is the time from the request to start (the container's image is pulled and its sandbox runs already, as with every
// system) to the first correct reply, which touches 1 % of the memory of the synthetic server.
//
// Without flags it measures the synthetic server on the loopback interface, which takes some minutes; `make bench` measures all.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/link"
	"thaw.dev/thaw/test/workloads"
)

// all is what flags with lists understand for everything.
const all = "all"

// bench is one run.
type bench struct {
	results
	s       *stack.Stack
	runs    int
	systems []string
	parts   []string
	out     string
	failed  error // all that went wrong
}

// Parts of a run.
const (
	partRestores = "restores" // first replies of all systems
	partComplete = "complete" // all memory, after the first reply
	partClones   = "clones"   // many restores of one image at once
	partFaults   = "faults"   // single page faults
	partChunks   = "chunks"   // sizes of chunks and levels of compression
)

// parts measures what is to be measured of a lane.
func (b *bench) measureParts(ctx context.Context, l *lane) error {
	for _, p := range []struct {
		name    string
		applies bool
		measure func(context.Context, *lane) error
	}{
		{partRestores, true, b.restores},
		{partComplete, l.workload == workloads.Synthetic, b.complete},
		// Over one link: the slower one, which is the last.
		{partClones, l.workload == workloads.Synthetic && l.mib == clonesMiB && l.link == b.links[len(b.links)-1].name, b.clones},
		{partFaults, l.workload == workloads.Synthetic && l.mib == faultsMiB && l.link == loopback, b.faults},
		{partChunks, l.workload != workloads.Synthetic && l.link == loopback, b.chunks},
	} {
		if p.applies && slices.Contains(b.parts, p.name) {
			if err := p.measure(ctx, l); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return nil
}

func (b *bench) wants(system string) bool { return slices.Contains(b.systems, system) }

// options are what the flags say.
type options struct {
	sizes, workloads, links, systems, parts string
	runs                                    int
	out                                     string
}

func main() {
	var o options
	flag.StringVar(&o.sizes, "sizes", "64,512,2048", "memory of the synthetic server in MiB")
	flag.StringVar(&o.workloads, "workloads", workloads.Synthetic, "programs, or all: synthetic,agent,node,redis")
	flag.StringVar(&o.links, "links", loopback, "links between node and registry, or all: loopback,1g-1ms")
	flag.StringVar(&o.systems, "systems", "thaw,eager,criu-local,cold", "systems, or all: those and podman,estargz-criu")
	flag.StringVar(&o.parts, "parts", partRestores, "what is measured, or all: restores,clones,complete,faults,chunks")
	flag.IntVar(&o.runs, "runs", 5, "runs of each system")
	flag.StringVar(&o.out, "out", "build/bench/results.json", "where the rows are written; the other files go beside it")
	flag.Parse()
	stack.Isolate()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// list takes a flag apart.
func list(value string, everything ...string) []string {
	if value == all {
		return everything
	}
	return strings.Split(value, ",")
}

func run(ctx context.Context, o options) (err error) {
	b := &bench{runs: o.runs, out: o.out, systems: list(o.systems, thaw, eager, podman, estargz, criuLocal, coldStart)}
	b.parts = list(o.parts, partRestores, partComplete, partClones, partFaults, partChunks)
	subjects, err := subjectsOf(o)
	if err != nil {
		return err
	}
	links := list(o.links, loopback, shaped)
	for _, l := range links {
		if l != loopback && l != shaped {
			return fmt.Errorf("-links: there is no %q", l)
		}
	}
	if b.s, err = stack.Start(ctx, stack.Options{Progress: os.Stderr}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.s.Close()) }()
	began := time.Now()
	if err := b.measureLinks(ctx, links); err != nil {
		return fmt.Errorf("links: %w", err)
	}
	for _, g := range groups(subjects) {
		if err := b.group(ctx, g, links); err != nil {
			b.fail(err) // what was measured until then is shown
			break
		}
	}
	fmt.Fprintf(os.Stderr, "measured for %s\n", time.Since(began).Round(time.Second))
	b.printTable(os.Stdout)
	fmt.Println()
	b.printTargets(os.Stdout)
	return b.failed
}

// subjectsOf gives what is to be measured, the synthetic server first.
func subjectsOf(o options) ([]*subject, error) {
	var subjects []*subject
	for _, w := range list(o.workloads, workloads.Synthetic, workloads.Agent, workloads.Node, workloads.Redis) {
		sizes := []string{"0"}
		if w == workloads.Synthetic {
			sizes = strings.Split(o.sizes, ",")
		}
		for _, size := range sizes {
			mib, err := strconv.Atoi(size)
			if err != nil || mib < 1 && w == workloads.Synthetic {
				return nil, fmt.Errorf("-sizes: %q is no number of MiB", size)
			}
			s, err := subjectOf(w, mib)
			if err != nil {
				return nil, err
			}
			subjects = append(subjects, s)
		}
	}
	return subjects, nil
}

// registryOver is where the node reaches the registry over a link.
func registryOver(l string) string {
	if l == shaped {
		return stack.ShapedAddress
	}
	return stack.RegistryAddress
}

// shape is that of the link 1g-1ms.
var shape = link.Shape{Rate: 125e6, RoundTrip: time.Millisecond}

// groups gives the subjects in the order in which they are measured. Those of a group are measured over one link after the other. The
// smaller synthetic ones, which most targets are about, are a group and the first; of the others there is one at a time on the disk.
func groups(subjects []*subject) [][]*subject {
	const small = 2048
	first := []*subject{}
	others := [][]*subject{}
	for _, s := range subjects {
		if s.workload == workloads.Synthetic && s.mib <= small {
			first = append(first, s)
		} else {
			others = append(others, []*subject{s})
		}
	}
	return append([][]*subject{first}, others...)
}

// group measures everything with subjects. What goes wrong is noted and the rest is measured all the same; an error is one after
// which nothing can be measured any more.
func (b *bench) group(ctx context.Context, subjects []*subject, links []string) error {
	taken := make(map[*subject]*checkpoint)
	defer func() {
		for _, c := range taken {
			if err := c.remove(); err != nil {
				b.fail(err)
			}
		}
	}()
	for _, link := range links {
		for _, s := range subjects {
			if taken[s] == nil {
				c, err := take(ctx, b.s, s)
				if err != nil {
					b.fail(fmt.Errorf("checkpoint of %s: %w", s.name(), err))
					continue
				}
				taken[s] = c
			}
			if err := b.lane(ctx, &lane{checkpoint: taken[s], link: link, registry: registryOver(link)}); err != nil {
				b.fail(fmt.Errorf("%s over %s: %w", s.name(), link, err))
			}
			if err := errors.Join(ctx.Err(), b.write(b.out), b.writeReport(context.WithoutCancel(ctx))); err != nil {
				return err
			}
		}
	}
	return nil
}

// lane measures everything with one subject over one link.
func (b *bench) lane(ctx context.Context, l *lane) error {
	for _, image := range []string{l.plain(l.registry), l.published(l.registry)} {
		if err := b.s.EnsureImage(ctx, image, nil); err != nil {
			return err
		}
	}
	defer b.sizes(l)
	return b.measureParts(ctx, l)
}
