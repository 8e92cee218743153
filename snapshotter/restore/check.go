// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"fmt"
	"iter"
	"os"
	"runtime"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// checkHost refuses checkpoints of machines that this one cannot stand in for.
func checkHost(c *checkpoint.Config) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, errdefs.ErrFailedPrecondition)...)
	}
	if a := c.Host.Architecture; a != runtime.GOARCH {
		return refuse("the checkpoint was made on %.20q, this node is %q: run the pod on a node of that architecture", a, runtime.GOARCH)
	}
	if n := c.Host.PageSize; n != os.Getpagesize() || n != pageindex.PageSize {
		return refuse("the checkpoint has pages of %d bytes, this node %d: run the pod on a node with that page size", n, os.Getpagesize())
	}
	here, err := criu.CPUFeatures()
	if err != nil {
		return fmt.Errorf("this node's CPU features: %w", err)
	}
	return criu.CheckCPU(c.Host.CPUFeatures, here)
}

// checkBlobs makes sure that a page index refers to nothing but layers of its
// manifest: only those are kept by the registry and were paid for by who pushed.
func checkBlobs(x *pageindex.Index, img *checkpoint.Image) error {
	sizes := make(map[digest.Digest]int64, len(img.Pages))
	for _, p := range img.Pages {
		sizes[p.Digest] = p.Size
	}
	if len(x.Blobs) < len(img.Pages) {
		return fmt.Errorf("%w: manifest has %d page blobs, the page index %d", checkpoint.ErrFormat, len(img.Pages), len(x.Blobs))
	}
	for i := range x.Blobs {
		b := &x.Blobs[i]
		size, ok := sizes[b.Digest]
		if !ok {
			return fmt.Errorf("%w: page index refers to %s, which is no layer of the manifest", checkpoint.ErrFormat, b.Digest)
		}
		if size != b.Size() {
			return fmt.Errorf("%w: page blob %s has %d bytes, the page index has %d", checkpoint.ErrFormat, b.Digest, size, b.Size())
		}
	}
	return nil
}

// checkPages makes sure that the page index has exactly the pages that CRIU will
// leave to the fault handler. A page that CRIU leaves out and the index does not
// have would be zero where it had content; one that the index has and CRIU
// reads too would be there twice.
func checkPages(x *pageindex.Index, dir string) error {
	images, err := image.Open(dir)
	if err != nil {
		return err
	}
	defer images.Close()
	maps, err := images.Pagemaps()
	if err != nil {
		return err
	}
	known := make(map[uint32]struct{}, len(maps))
	for _, p := range maps {
		if p.Shared {
			if p.LazySize() != 0 {
				return fmt.Errorf("%w: shared memory %d has lazy pages", checkpoint.ErrFormat, p.ID)
			}
			continue
		}
		pid := uint32(p.ID)
		if uint64(pid) != p.ID {
			return fmt.Errorf("%w: pagemap of process %d", checkpoint.ErrFormat, p.ID)
		}
		known[pid] = struct{}{}
		var runs []pageindex.Run
		if entry, ok := x.Process(pid); ok {
			runs = entry.Runs
		}
		if err := samePages(pid, p, runs); err != nil {
			return err
		}
	}
	for i := range x.Processes {
		if _, ok := known[x.Processes[i].PID]; !ok {
			return fmt.Errorf("%w: page index has process %d, of which there is no pagemap", checkpoint.ErrFormat, x.Processes[i].PID)
		}
	}
	return nil
}

// span is a range of addresses.
type span struct{ start, end uint64 }

func samePages(pid uint32, p *image.Pagemap, runs []pageindex.Run) error {
	next, stop := iter.Pull(merged(func(yield func(span) bool) {
		for r := range p.Lazy() {
			if !yield(span{r.Start, r.End()}) {
				return
			}
		}
	}))
	defer stop()
	for got := range merged(func(yield func(span) bool) {
		for _, r := range runs {
			if !yield(span{r.Start, r.End()}) {
				return
			}
		}
	}) {
		if want, ok := next(); !ok || want != got {
			return contradiction(pid, got)
		}
	}
	if want, ok := next(); ok {
		return contradiction(pid, want)
	}
	return nil
}

func contradiction(pid uint32, at span) error {
	return fmt.Errorf("%w: page index and CRIU's pagemap of process %d contradict each other about the pages from %#x to %#x", checkpoint.ErrFormat, pid, at.start, at.end)
}

// merged joins spans that follow each other without a gap.
func merged(in iter.Seq[span]) iter.Seq[span] {
	return func(yield func(span) bool) {
		var cur span
		for s := range in {
			if s.start == cur.end && cur.end != 0 {
				cur.end = s.end
				continue
			}
			if cur.end != 0 && !yield(cur) {
				return
			}
			cur = s
		}
		if cur.end != 0 {
			yield(cur)
		}
	}
}

// totalPages is the number of lazy pages of all processes, at most 2^63: many processes may
// claim an address space each.
func totalPages(x *pageindex.Index) (n uint64) {
	for i := range x.Processes {
		total, _ := x.Processes[i].Pages()
		if n += total; n > 1<<63 {
			return 1 << 63
		}
	}
	return n
}
