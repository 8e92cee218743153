// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/uffd"
	"thaw.dev/thaw/shim/readahead"
)

// loop is what only the goroutine that serves faults touches.
type loop struct {
	spaces map[int32]*space // by descriptor
	// leaving are those that were let go of and are still held elsewhere.
	leaving map[int32]*space
	// restless are the spaces whose epoch should end soon: they have children that
	// are not followed yet, or memory was moved.
	restless map[*space]bool
	failed   error                 // what cannot be returned
	predict  []readahead.Predictor // by blob
	asked    chunkSet              // ahead of a fault
	ahead    ahead
	waits    map[Chunk]*wait
	events   uffd.Buffer
	round    []fault // to be answered now
	retry    []fault // to be answered when something has changed

	spins      int           // since something had to be tried again
	noMemory   time.Duration // when the kernel began to refuse, since started; 0: it does not
	started    time.Time
	background int // requests without demand under way
	fills      []chan struct{}
	restored   bool
	stalled    bool      // background filling had to be put off
	unsettled  bool      // some of the restless are not quiet
	paused     bool      // background filling waits for a chunk
	holdOff    time.Time // no background filling before
	swept      int       // address spaces to have before the next look for dead ones
}

// fault is a page that a thread waits for.
type fault struct {
	*space
	page uint64
}

// wait is a chunk that was asked for.
type wait struct {
	demand bool
	faults []fault
}

const (
	// maxNoMemory is how long the kernel may refuse memory. When a container is at
	// its limit, its memory cgroup kills one of its processes before long.
	maxNoMemory = 10 * time.Second
	// maxSpins is how often a refused fill is tried at once, giving way to other
	// threads, before a wait of a millisecond between the tries. The kernel
	// does not tell when a change of mappings is over; it is as soon as the thread
	// that made it runs again.
	maxSpins = 64
	// slice is the shortest that the kernel takes.
	slice = 100 * time.Microsecond
	// minSweep is the least number of address spaces at which dead ones are looked
	// for without being asked.
	minSweep = 16
	// retryBackground is the pause after a background request that failed.
	retryBackground = time.Second
)

func (l *loop) init(p *Pager) {
	l.predict = make([]readahead.Predictor, len(p.stores))
	l.spaces, l.leaving, l.restless, l.waits = map[int32]*space{}, map[int32]*space{}, map[*space]bool{}, map[Chunk]*wait{}
	l.swept, l.started = minSweep, time.Now()
}

// run serves until it fails or is told to end.
func (p *Pager) run() {
	defer shortenSlice()()
	err := p.serveSafely()
	if err == errClosing {
		close(p.done)
		return
	}
	err = fmt.Errorf("memory of the restored container cannot be served: %w", err)
	p.mu.Lock()
	p.failure = err
	p.mu.Unlock()
	close(p.done)
	p.cancel()
	if p.cfg.OnFatal != nil {
		p.cfg.OnFatal(err)
	}
}

// shortenSlice gives the calling goroutine a thread of its own with the shortest time slice. Threads that wait for a page
// wait for it, and its work is short: so it takes the processor from those with longer slices (EEVDF, since Linux 6.12; earlier
// kernels ignore it). What fails costs time only. restore gives the thread back as it was: if it ended, so would all
// processes that were started from it with a parent death signal.
func shortenSlice() (restore func()) {
	runtime.LockOSThread()
	const thisThread = 0
	before, err := unix.SchedGetAttr(thisThread, 0)
	if err != nil || before.Policy != unix.SCHED_NORMAL {
		return runtime.UnlockOSThread
	}
	short := *before
	short.Runtime = uint64(slice)
	_ = unix.SchedSetAttr(thisThread, &short, 0)
	return func() {
		_ = unix.SchedSetAttr(thisThread, before, 0)
		runtime.UnlockOSThread()
	}
}

// serveSafely is serve, in which reading a mapped file that is not there any more, or cannot be read from the disk, is an error
// and not the end of the process.
func (p *Pager) serveSafely() (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		fault, ok := r.(interface{ Addr() uintptr })
		if !ok || !slices.ContainsFunc(p.stores, func(s *store) bool { return s.maps(fault.Addr()) }) {
			panic(r)
		}
		err = errUnreadable
	}()
	return p.serve()
}

var errUnreadable = errors.New("page store cannot be read: check the disk of the cache folder")

func (p *Pager) serve() error {
	l := &p.loop
	ready := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(p.epoll, ready, p.timeout())
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("epoll_wait: %w", err)
		}
		for _, e := range ready[:n] {
			if e.Fd == int32(p.eventfd) {
				err = p.messages()
			} else if s := l.spaces[e.Fd]; s != nil {
				err = p.drain(s)
			} else if s := l.leaving[e.Fd]; s != nil {
				err = p.drain(s)
			}
			if err != nil {
				return err
			}
		}
		if err := p.answerAll(); err != nil {
			return err
		}
		if l.unsettled = p.settle(); l.failed != nil {
			return l.failed
		}
		if len(l.spaces) >= l.swept {
			p.sweepDead()
		}
		if len(l.retry) == 0 {
			if err := p.fillSome(); err != nil {
				return err
			}
		}
	}
}

// timeout returns how long to wait for events, in milliseconds.
func (p *Pager) timeout() int {
	l := &p.loop
	switch {
	case len(l.retry) > 0 || l.stalled || l.unsettled:
		l.spins++
		if l.spins > maxSpins {
			return 1
		}
		unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		runtime.Gosched()
		return 0
	case l.restored && len(l.ahead.ready) > 0:
		l.spins = 0
		return 0
	case l.filling() && !l.paused:
		l.spins = 0
		if wait := time.Until(l.holdOff); wait > 0 {
			return int(wait/time.Millisecond) + 1
		}
		return 0
	}
	l.spins = 0
	return -1
}

func (l *loop) filling() bool { return l.restored && len(l.fills) > 0 && len(l.spaces) > 0 }

// messages takes what other goroutines left.
func (p *Pager) messages() error {
	l := &p.loop
	var b [8]byte
	unix.Read(p.eventfd, b[:]) // EAGAIN: taken before
	p.mu.Lock()
	incoming, landed, sweep, closing := p.incoming, p.landed, p.sweep, p.closing
	expected := p.expected
	restored := p.restored && !l.restored
	l.restored = p.restored
	l.fills = append(l.fills, p.fills...)
	p.incoming, p.landed, p.fills, p.sweep, p.expected = nil, nil, nil, false, nil
	for _, s := range incoming { // before anything can fail: Close must find them
		p.keep(s)
	}
	released, unheld := p.released, p.unheld
	p.released = nil
	p.mu.Unlock()
	if closing {
		return errClosing
	}
	if unheld != nil {
		return unheld
	}
	for _, s := range released {
		p.close(s)
	}
	l.paused = false
	for _, s := range incoming {
		if err := p.follow(s); err != nil {
			return err
		}
	}
	if len(expected) > 0 {
		p.expect(expected)
	}
	for _, r := range landed {
		if err := p.land(r); err != nil {
			return err
		}
	}
	if sweep {
		p.sweepDead()
	}
	if restored {
		for _, s := range l.spaces {
			p.letGoIfComplete(s)
		}
	}
	p.tellFilled()
	return nil
}

// keep notes an address space, so that its descriptor is closed some day.
func (p *Pager) keep(s *space) {
	p.loop.spaces[int32(s.fd)] = s
	p.live.Add(1)
}

// follow begins to read an address space's events.
func (p *Pager) follow(s *space) error {
	if err := p.watch(int(s.fd)); err != nil {
		return fmt.Errorf("userfaultfd of task %d: %w", s.pid, err)
	}
	return nil
}

// sweepDead lets go of address spaces that have ended. Not to be called while
// events are applied.
func (p *Pager) sweepDead() {
	for _, s := range p.loop.spaces {
		if !s.fd.Alive() {
			p.drop(s)
		}
	}
	// The next time by itself when there are twice as many, so that a storm of
	// forks costs a constant number of looks for each.
	p.loop.swept = max(minSweep, 2*len(p.loop.spaces))
}

// drop ends the following of an address space that has ended or wants nothing.
func (p *Pager) drop(s *space) {
	if s.left {
		return
	}
	s.left = true
	p.quiet(s) // all its threads are dead, so all has happened and is read
	delete(p.loop.spaces, int32(s.fd))
	p.account(s, s.wanted.pages)
	s.wanted = ranges{}
	p.live.Add(-1)
	if p.cfg.Holder == nil || p.holding.cancel(s) {
		p.close(s)
		return
	}
	p.loop.leaving[int32(s.fd)] = s
	p.holding.ask(handover{s, true})
}

// close closes the descriptor of an address space that was let go of.
func (p *Pager) close(s *space) {
	s.recent.doubt = false // nothing depends on any order
	p.quiet(s)             // children go on
	s.gone = true
	s.pending = nil
	delete(p.loop.restless, s)
	delete(p.loop.leaving, int32(s.fd))
	s.fd.Close() // nobody else has it, so that it leaves the epoll set as well
	p.tellFilled()
}

// letGoIfComplete lets go of an address space that wants nothing. All that is
// missing in it is zero, which is what the kernel gives without a handler.
func (p *Pager) letGoIfComplete(s *space) {
	if p.loop.restored && !s.left && s.parent == nil && len(s.young) == 0 && !s.recent.doubt && s.wanted.pages == 0 {
		p.drop(s)
	}
}

// tellFilled ends the Fill calls when there is nothing more to fill.
func (p *Pager) tellFilled() {
	l := &p.loop
	if !l.restored || len(l.spaces)+len(l.leaving) > 0 {
		return
	}
	for _, c := range l.fills {
		close(c)
	}
	l.fills = nil
}

// land handles the answer to a request.
func (p *Pager) land(r landing) error {
	l := &p.loop
	if r.urgency == Ahead { // for which nobody waits
		if r.err == nil {
			l.ahead.arrived(r.blob, r.chunks)
		}
		return nil
	}
	demand := r.urgency == Demand
	if !demand {
		l.background--
	}
	for _, c := range r.chunks {
		if err := p.landChunk(Chunk{r.blob, c}, demand, r.err); err != nil {
			return err
		}
	}
	return nil
}

// landChunk handles the answer for one chunk.
func (p *Pager) landChunk(c Chunk, demand bool, failure error) error {
	l := &p.loop
	w := l.waits[c]
	if w == nil {
		return nil
	}
	st := p.stores[c.Blob]
	present := st.present(int(c.Chunk))
	if failure == nil && !present {
		// The daemon was started anew since and has made another store, because this one was gone or damaged.
		if err := st.reopen(); err != nil {
			return err
		}
		present = st.present(int(c.Chunk))
	}
	if failure == nil && !present {
		return fmt.Errorf("chunk %d of blob %d was reported as fetched but is not marked in the page store: restart thaw-snapshotter", c.Chunk, c.Blob)
	}
	if !present {
		if w.demand && !demand {
			return nil // the request that faults wait for is still under way
		}
		if demand && anyAlive(w.faults) {
			if errors.Is(failure, context.Canceled) && p.ctx.Err() != nil {
				return errClosing
			}
			return fmt.Errorf("chunk %d of blob %d: %w", c.Chunk, c.Blob, failure)
		}
		// Nobody waits. The background filling asks again, but not at once: the
		// registry may be down for long, and a fault will ask for itself.
		l.holdOff = time.Now().Add(retryBackground)
		delete(l.waits, c)
		return nil
	}
	for _, f := range w.faults {
		f.touches.add(f.page / faultWindow) // who waited so long shall not come again soon
	}
	l.round = append(l.round, w.faults...)
	delete(l.waits, c)
	return nil
}

// anyAlive tells whether some thread still waits.
func anyAlive(faults []fault) bool {
	for _, f := range faults {
		if _, ok := f.pending[f.page]; ok && !f.gone && f.fd.Alive() {
			return true
		}
	}
	return false
}

// answerAll answers the faults at hand.
func (p *Pager) answerAll() error {
	l := &p.loop
	l.round = append(l.round, l.retry...)
	l.retry = l.retry[:0]
	for i := 0; i < len(l.round); i++ { // it grows when events are read
		f := l.round[i]
		if err := p.answerOne(f); err != nil {
			return err
		}
		if !f.gone {
			p.letGoIfComplete(f.space)
		}
	}
	clear(l.round)
	l.round = l.round[:0]
	return nil
}

func (p *Pager) answerOne(f fault) error {
	l := &p.loop
	for try := 0; ; try++ {
		if _, ok := f.pending[f.page]; !ok || f.gone {
			return nil // answered together with another one
		}
		switch err := p.answer(f.space, f.page); err {
		case nil:
			return nil
		case unix.ESRCH:
			p.drop(f.space)
			return nil
		case unix.EAGAIN:
			if try > 0 {
				l.retry = append(l.retry, f)
				return nil
			}
			if err := p.drain(f.space); err != nil {
				return err
			}
		case unix.ENOMEM:
			return p.outOfMemory(f)
		default:
			return err
		}
	}
}

// outOfMemory puts a fault off. The limit of a memory cgroup is enforced by a
// kill inside it, which ends the waiting.
func (p *Pager) outOfMemory(f fault) error {
	l := &p.loop
	now := max(time.Since(l.started), 1)
	if l.noMemory == 0 {
		l.noMemory = now
	}
	if now-l.noMemory > maxNoMemory {
		return fmt.Errorf("no memory for pages of task %d in %v (%w): raise the container's memory limit", f.pid, maxNoMemory, unix.ENOMEM)
	}
	l.spins = maxSpins
	l.retry = append(l.retry, f)
	return nil
}

// fillSome does one step of the background filling.
func (p *Pager) fillSome() error {
	l := &p.loop
	l.stalled = false
	if l.restored && len(l.ahead.ready) > 0 {
		return p.fillExpected()
	}
	if !l.filling() || l.paused || time.Now().Before(l.holdOff) {
		return nil
	}
	for _, s := range l.spaces {
		if s.parent != nil {
			continue // not followed yet
		}
		more, err := p.fillNext(s)
		switch err {
		case nil:
		case unix.ESRCH:
			p.drop(s)
			return nil
		case unix.EAGAIN, unix.ENOMEM: // at the limit the program comes first
			l.stalled = true
			if err == unix.ENOMEM {
				l.spins = maxSpins
			}
			return p.drain(s)
		default:
			return err
		}
		p.letGoIfComplete(s)
		if more {
			return nil
		}
	}
	l.paused = true
	return nil
}
