// SPDX-License-Identifier: Apache-2.0

package pager

import (
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

const (
	// maxSpins is how often a refused fill is tried at once, giving way to other
	// threads, before a wait of a millisecond between the tries. The kernel
	// does not tell when a change of mappings is over; it is as soon as the thread
	// that made it runs again.
	maxSpins = 64
	// slice is the shortest that the kernel takes.
	slice = 100 * time.Microsecond
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
	released := p.released
	p.released = nil
	p.mu.Unlock()
	if closing {
		return errClosing
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
