// SPDX-License-Identifier: Apache-2.0

package pagestore

import "time"

// want is one chunk that somebody asked for. Guarded by Store.mu, but for err,
// which is written before done is closed.
type want struct {
	blob    *Blob
	chunk   int
	src     Source
	demand  bool // a process waits
	state   wantState
	waiters int
	done    chan struct{}
	err     error
}

type wantState uint8

const (
	queued wantState = iota
	running
	finished
)

func (w *want) finish(err error) {
	if w.state != finished {
		w.state, w.err = finished, err
		close(w.done)
	}
}

// scheduler decides what is fetched next. Guarded by Store.mu.
type scheduler struct {
	// Both are in the order of asking. A want that was promoted or dropped
	// stays in the background queue until it is met there.
	demand, background []*want

	demandRuns, backgroundRuns int
	lastDemand                 time.Time // when the last request with a waiting process ended
	nextBackground             time.Time // by the rate limit
	timer                      *time.Timer
}

func (q *scheduler) add(w *want) {
	if w.demand {
		q.demand = append(q.demand, w)
	} else {
		q.background = append(q.background, w)
	}
}

// promote is for a want that has become one with a waiting process.
func (q *scheduler) promote(w *want) {
	if w.state == queued {
		q.demand = append(q.demand, w)
	}
}

func (q *scheduler) stop() {
	if q.timer != nil {
		q.timer.Stop()
	}
}

// task is one request: neighbouring chunks of a blob.
type task struct {
	wants  []*want
	demand bool
	size   int64
}

// take returns the next request, or nil and how long to wait before asking
// again; 0 is until something changes.
func (q *scheduler) take(now time.Time, opts *Options) (*task, time.Duration) {
	for len(q.demand) > 0 {
		w := q.demand[0]
		q.demand = q.demand[1:]
		if w.state == queued {
			return q.start(w, true, opts), 0
		}
	}
	if q.demandRuns > 0 || q.backgroundRuns >= max(opts.Parallel-reserved, 1) {
		return nil, 0
	}
	for len(q.background) > 0 {
		w := q.background[0]
		if w.state != queued || w.demand {
			q.background = q.background[1:]
			continue
		}
		if wait := max(q.lastDemand.Add(opts.Quiet).Sub(now), q.nextBackground.Sub(now)); wait > 0 {
			return nil, wait
		}
		q.background = q.background[1:]
		t := q.start(w, false, opts)
		if opts.BackgroundRate > 0 {
			pause := time.Duration(float64(t.size) / float64(opts.BackgroundRate) * float64(time.Second))
			q.nextBackground = later(now, q.nextBackground).Add(pause)
		}
		return t, 0
	}
	return nil, 0
}

// reserved is how many of the parallel requests the background leaves free, so
// that a process never waits for it to end.
const reserved = 2

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// start makes a request of a want and the wants for the chunks right behind it.
// Chunks are handed out while the answer streams in, so those behind do not
// delay the first.
func (q *scheduler) start(w *want, demand bool, opts *Options) *task {
	t := &task{demand: demand}
	b := w.blob
	for n := w; n != nil && n.state == queued && n.src == w.src; n = b.wants[n.chunk+1] {
		size := int64(b.index.Chunks[n.chunk].Size)
		if len(t.wants) > 0 && t.size+size > opts.RequestSize {
			break
		}
		n.state = running
		t.size += size
		t.wants = append(t.wants, n)
	}
	b.refs++ // until the request has ended
	if demand {
		q.demandRuns++
	} else {
		q.backgroundRuns++
	}
	return t
}

func (q *scheduler) end(t *task, now time.Time) {
	if t.demand {
		q.demandRuns--
		q.lastDemand = now
	} else {
		q.backgroundRuns--
	}
}
