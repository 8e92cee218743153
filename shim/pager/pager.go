// SPDX-License-Identifier: Apache-2.0

// Package pager is the fault handler of one restored container: it fills the
// memory of the container's processes, page by page as they touch it or all of
// it, from the node's page store.
//
// For each address space it holds what is still wanted: which ranges of virtual
// pages have to get which pages of the checkpoint. A page that is wanted is
// copied from the mapped store, or waits until the daemon has fetched its chunk;
// every other page that faults is zero. The set follows what the program does to
// its memory: pages that are unmapped or thrown away are wanted no more, pages that
// are moved are wanted elsewhere, and a forked child wants what its parent wants.
//
// Three rules make that exact although the program runs on meanwhile:
//
//   - One goroutine reads all events and does all copies of a container, so that
//     what is wanted never changes between a decision and its copy.
//   - While a change of mappings is in flight the kernel refuses to fill (EAGAIN).
//     The handler then reads events and decides anew. So nothing is filled by a
//     decision that an unread event makes wrong.
//   - A wanted page is struck off only when the kernel says that it is filled, or
//     an event says that the program gave it up.
//
// What is wrong beyond repair (a chunk that cannot be had, an ioctl that fails in
// a way that must not happen) ends all serving and is reported to [Config].OnFatal:
// waiting threads wait on, nobody sees a wrong page, and the container is to be
// killed.
package pager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
	"thaw.dev/thaw/snapshotter/pageindex"
)

const pageSize = pageindex.PageSize

// Policy says what is filled beyond what is touched.
type Policy string

const (
	// Lazy fills what is touched.
	Lazy Policy = "lazy"
	// Cached fills what is touched. (The daemon fetches the rest into the page
	// store meanwhile; that makes no difference here.)
	Cached Policy = "cached"
	// Complete fills all memory in the background once the restore is done.
	Complete Policy = "complete"
)

// Urgency is how soon chunks are needed.
type Urgency int

const (
	// Background is some day.
	Background Urgency = iota
	// Ahead is soon: a process is likely to touch them.
	Ahead
	// Demand is now: a process waits.
	Demand
)

// Fetcher brings chunks into the page store.
type Fetcher interface {
	// Fetch returns when the chunks of a blob (an index into the page index's
	// blobs) are in the store and marked present. The same chunk may be asked for
	// again with more urgency, to overtake. Fetch is called from several goroutines
	// and must return soon after the context is done. It does its own retries: an
	// error with Demand is the end of the container.
	Fetch(ctx context.Context, blob uint32, chunks []uint32, urgency Urgency) error
}

// Holder keeps duplicates of userfaultfds in a process far from this one. A
// descriptor that closes with its last holder makes missing pages read as zeros.
// What keeps them open when this process dies is its guard (package guard); the
// holder does when both do. So nothing waits for it. Its methods are called one
// after another.
type Holder interface {
	// Hold gives the other process a duplicate of fd. It returns when that is done or
	// refused, or when the context has ended; it waits for a process that is away.
	// id is unique in this pager.
	Hold(ctx context.Context, id uint64, fd int)
	// Forget makes the other process close its duplicate: the address space is
	// gone or complete. It returns when that is done or the context has ended;
	// from then on the holder does not use the descriptor.
	Forget(ctx context.Context, id uint64)
}

// Store names the files of one page blob in the node's page store.
type Store struct {
	Data    string // uncompressed pages, at their offset in the blob
	Present string // bitmap: bit i%8 of byte i/8 says that chunk i is in Data
}

// Config is what a Pager needs to know. It must not change after New.
type Config struct {
	Index   *pageindex.Index
	Stores  []Store // one for each of the index's blobs
	Fetcher Fetcher
	Holder  Holder // nil: there is none
	Policy  Policy
	// OnFatal is called at most once, with an error of one line. No fault is
	// served from then on: kill the container, then Close.
	OnFatal func(error)
}

// Chunk names a chunk of the page index.
type Chunk struct{ Blob, Chunk uint32 }

// Stats are a pager's counters. They only grow.
type Stats struct {
	State         string // restoring, lazy, complete or failed
	PagesTotal    uint64 // lazy pages at dump time, of all processes in the index
	PagesPresent  uint64 // of them filled in, or given up by the program
	Faults        uint64 // fault events read
	RemoteFaults  uint64 // of them on chunks that were not in the page store
	ZeroFaults    uint64 // of them on pages that are not in the checkpoint
	FaultWaitP50  time.Duration
	FaultWaitP99  time.Duration
	CopiedPages   uint64 // copied into processes, children included
	Ioctls        uint64 // calls that filled or tried to
	AddressSpaces int    // followed now
}

// Pager is the fault handler of one container.
type Pager struct {
	cfg     Config
	stores  []*store
	epoll   int
	eventfd int // wakes the loop
	ctx     context.Context
	cancel  context.CancelFunc
	fetches fetches
	holding holding
	done    chan struct{} // closed when the loop has ended
	nextID  atomic.Uint64
	rec     record

	total        uint64
	missing      atomic.Int64 // pages wanted by dumped processes
	faults       atomic.Uint64
	remoteFaults atomic.Uint64
	zeroFaults   atomic.Uint64
	copied       atomic.Uint64
	ioctls       atomic.Uint64
	live         atomic.Int64
	wait         histogram

	mu       sync.Mutex // guards what follows: messages to the loop
	pids     map[uint32]bool
	incoming []*space
	landed   []landing
	released []*space // whose descriptors nobody else holds any more
	expected []Chunk
	fills    []chan struct{}
	restored bool
	sweep    bool
	closing  bool
	failure  error

	loop loop // of the loop's goroutine alone; of Close after done
}

// New returns a running pager without any process. Errors name the file that
// is missing or damaged.
func New(cfg Config) (*Pager, error) {
	if len(cfg.Stores) != len(cfg.Index.Blobs) {
		return nil, fmt.Errorf("pager: %d page stores for %d blobs: %w", len(cfg.Stores), len(cfg.Index.Blobs), errdefs.ErrInvalidArgument)
	}
	switch cfg.Policy {
	case Lazy, Cached, Complete:
	default:
		return nil, fmt.Errorf("pager: unknown policy %q (lazy, cached or complete): %w", cfg.Policy, errdefs.ErrInvalidArgument)
	}
	p := &Pager{cfg: cfg, epoll: -1, eventfd: -1, done: make(chan struct{}), pids: map[uint32]bool{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if err := p.open(); err != nil {
		p.release()
		return nil, fmt.Errorf("pager: %w", err)
	}
	for i := range cfg.Index.Processes {
		n, _ := cfg.Index.Processes[i].Pages()
		p.total += n
	}
	p.missing.Store(int64(p.total))
	p.rec.seen, p.loop.asked = newChunkSet(cfg.Index), newChunkSet(cfg.Index)
	p.fetches.p = p
	p.holding.p = p
	p.loop.init(p)
	go p.run()
	return p, nil
}

func (p *Pager) open() error {
	for i := range p.cfg.Stores {
		s, err := openStore(p.cfg.Stores[i], &p.cfg.Index.Blobs[i])
		if err != nil {
			return err
		}
		p.stores = append(p.stores, s)
	}
	var err error
	if p.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		p.epoll = -1
		return os.NewSyscallError("epoll_create1", err)
	}
	if p.eventfd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		p.eventfd = -1
		return os.NewSyscallError("eventfd", err)
	}
	return p.watch(p.eventfd)
}

func (p *Pager) watch(fd int) error {
	e := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(p.epoll, unix.EPOLL_CTL_ADD, fd, &e))
}

// release gives back what open took.
func (p *Pager) release() {
	p.cancel()
	for _, fd := range []int{p.epoll, p.eventfd} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	for _, s := range p.stores {
		s.close()
	}
}

// wake makes the loop look at its messages. It must not be called when Close may
// have ended: with mu held and closing not set, or by what Close waits for.
func (p *Pager) wake() {
	one := [8]byte{1, 1, 1, 1, 1, 1, 1, 1} // any value but the largest will do
	unix.Write(p.eventfd, one[:])          // EAGAIN: it is awake already
}

// Add makes the pager serve a process: pid is its number in the page index, fd
// its userfaultfd, which must be non-blocking and belongs to the pager if Add
// returns nil. Every process must be added, even one without lazy pages, before
// it may run.
func (p *Pager) Add(pid uint32, fd int) error {
	proc, ok := p.cfg.Index.Process(pid)
	if !ok {
		return fmt.Errorf("pager: task %d is not in the page index: the checkpoint's parts do not belong together: %w", pid, errdefs.ErrNotFound)
	}
	s := &space{fd: uffd.FD(fd), id: p.nextID.Add(1), pid: pid, pending: map[uint64]waiting{}}
	s.wanted = newRanges(proc.Runs)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.usable(); err != nil {
		return err
	}
	if p.pids[pid] {
		return fmt.Errorf("pager: task %d: %w", pid, errdefs.ErrAlreadyExists)
	}
	p.pids[pid] = true
	if p.cfg.Holder != nil {
		p.holding.ask(handover{s, false})
	}
	p.incoming = append(p.incoming, s)
	p.wake()
	return nil
}

// usable returns why the pager serves no more, if so. mu must be held.
func (p *Pager) usable() error {
	if p.failure != nil {
		return p.failure
	}
	if p.closing {
		return fmt.Errorf("pager: closed: %w", errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Restored says that CRIU has handed over and registered all that it will. The
// background filling of policy Complete starts, and address spaces that want
// nothing more are let go of.
func (p *Pager) Restored() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closing {
		return
	}
	p.restored = true
	if p.cfg.Policy == Complete {
		p.fills = append(p.fills, make(chan struct{}))
	}
	p.wake()
}

// Fill fills all memory of all processes and returns when nothing is wanted any
// more; the processes are then ordinary ones. A process must be filled before it
// can be dumped again: CRIU does not see pages that are not there. Fill does not
// end before Restored was called. If the context ends before, filling goes on.
func (p *Pager) Fill(ctx context.Context) error {
	full := make(chan struct{})
	p.mu.Lock()
	err := p.usable()
	if err == nil {
		p.fills = append(p.fills, full)
		p.wake()
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case <-full:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.done:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.usable()
}

// Stats returns the counters.
func (p *Pager) Stats() Stats {
	s := Stats{
		State:         "lazy",
		PagesTotal:    p.total,
		PagesPresent:  p.total - uint64(max(p.missing.Load(), 0)),
		Faults:        p.faults.Load(),
		RemoteFaults:  p.remoteFaults.Load(),
		ZeroFaults:    p.zeroFaults.Load(),
		FaultWaitP50:  p.wait.quantile(0.5),
		FaultWaitP99:  p.wait.quantile(0.99),
		CopiedPages:   p.copied.Load(),
		Ioctls:        p.ioctls.Load(),
		AddressSpaces: int(p.live.Load()),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.failure != nil:
		s.State = "failed"
	case !p.restored:
		s.State = "restoring"
	case s.AddressSpaces == 0 && s.PagesPresent == s.PagesTotal:
		s.State = "complete"
	}
	if !p.closing && !p.sweep {
		// Nothing tells when a process exits, so it is looked at now and then.
		p.sweep = true
		p.wake()
	}
	return s
}

// WorkingSet returns the chunks in the order in which faults first touched
// them, at most MaxRecorded. It may be called at any time.
func (p *Pager) WorkingSet() []Chunk { return p.rec.list() }

// Close ends the pager and closes the userfaultfds. Every process of the
// container must be dead: from then on a page that was still missing would read
// as zeros. It may be called more than once and from OnFatal.
func (p *Pager) Close() {
	p.mu.Lock()
	if p.closing {
		p.mu.Unlock()
		<-p.done
		return
	}
	p.closing = true
	p.wake()
	p.mu.Unlock()
	p.cancel()
	<-p.done
	p.fetches.wg.Wait()
	p.holding.wg.Wait()
	p.mu.Lock()
	spaces := slices.Clone(p.incoming)
	p.incoming = nil
	p.mu.Unlock()
	for _, m := range []map[int32]*space{p.loop.spaces, p.loop.leaving} {
		for _, s := range m {
			spaces = append(spaces, s)
		}
	}
	for _, s := range spaces {
		if p.cfg.Holder != nil {
			p.cfg.Holder.Forget(p.ctx, s.id)
		}
		s.fd.Close()
	}
	p.loop.spaces, p.loop.leaving = nil, nil
	p.live.Store(0)
	p.release()
}

var errClosing = errors.New("closing")
