// SPDX-License-Identifier: Apache-2.0

package pagestore

import "time"

// want is one chunk that somebody asked for. Guarded by Store.mu, but for began and
// err, which are written before done is closed.
type want struct {
	blob    *Blob
	chunk   int
	src     Source
	urgency Urgency
	state   wantState
	waiters int
	began   time.Time // of its request
	done    chan struct{}
	err     error
}

// Urgency is how soon a chunk is needed.
type Urgency uint8

const (
	Background Urgency = iota // some day
	Soon                      // a process is likely to touch it
	Demand                    // a process waits
	urgencies
)

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
	// By urgency, in the order of asking. A want that became more urgent or was
	// dropped stays in its old queue until it is met there.
	queues [urgencies][]*want
	runs   [urgencies]int // requests under way

	lastDemand     time.Time // when the last request with a waiting process ended
	nextBackground time.Time // by the rate limit
	timer          *time.Timer
}

// add is for a new want and for one that has become more urgent.
func (q *scheduler) add(w *want) {
	if w.state == queued {
		q.queues[w.urgency] = append(q.queues[w.urgency], w)
	}
}

func (q *scheduler) stop() {
	if q.timer != nil {
		q.timer.Stop()
	}
}

// task is one request: neighbouring chunks of a blob.
type task struct {
	wants   []*want
	urgency Urgency
	size    int64
}

// peek returns the first want of a queue that is still to be fetched from there.
func (q *scheduler) peek(u Urgency) *want {
	for len(q.queues[u]) > 0 {
		w := q.queues[u][0]
		if w.state == queued && w.urgency == u {
			return w
		}
		q.queues[u] = q.queues[u][1:]
	}
	return nil
}

// take returns the next request, or nil and how long to wait before asking
// again; 0 is until something changes.
func (q *scheduler) take(now time.Time, opts *Options) (*task, time.Duration) {
	if w := q.peek(Demand); w != nil {
		return q.start(w, Demand, opts), 0
	}
	free := max(opts.Parallel-reserved, 1)
	if q.runs[Demand] > 0 {
		free = min(free, besideDemand)
	}
	if w := q.peek(Soon); w != nil && q.runs[Soon]+q.runs[Background] < free {
		return q.start(w, Soon, opts), 0
	}
	if q.runs[Demand] > 0 || q.runs[Soon] > 0 || q.runs[Background] >= free {
		return nil, 0
	}
	w := q.peek(Background)
	if w == nil {
		return nil, 0
	}
	if wait := max(q.lastDemand.Add(opts.Quiet).Sub(now), q.nextBackground.Sub(now)); wait > 0 {
		return nil, wait
	}
	t := q.start(w, Background, opts)
	if opts.BackgroundRate > 0 {
		pause := time.Duration(float64(t.size) / float64(opts.BackgroundRate) * float64(time.Second))
		q.nextBackground = later(now, q.nextBackground).Add(pause)
	}
	return t, 0
}

// reserved is how many of the parallel requests the background leaves free, so
// that a process never waits for it to end.
const reserved = 2

// besideDemand is how many requests for what is needed soon may begin while a
// process waits: a few, since it is likely to wait for these next, but not so many
// that they take the line from it.
const besideDemand = 3

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// start makes a request of a want and the wants for the chunks right behind it.
// Chunks are handed out while the answer streams in, so those behind do not
// delay the first. What is needed soon is asked for in the order of touches: there
// the request begins with the first of the neighbours.
func (q *scheduler) start(w *want, u Urgency, opts *Options) *task {
	t := &task{urgency: u}
	now := time.Now()
	b := w.blob
	joins := func(n *want) bool { return n != nil && n.state == queued && n.src == w.src }
	if u == Soon {
		ahead := int64(0)
		for n := b.wants[w.chunk-1]; joins(n) && n.urgency >= Soon; n = b.wants[n.chunk-1] {
			if ahead += int64(b.index.Chunks[n.chunk].Size); ahead > opts.RequestSize/2 {
				break
			}
			w = n
		}
	}
	for n := w; joins(n) && (u != Soon || n.urgency >= Soon); n = b.wants[n.chunk+1] {
		size := int64(b.index.Chunks[n.chunk].Size)
		if len(t.wants) > 0 && t.size+size > opts.RequestSize {
			break
		}
		n.state, n.began = running, now
		t.size += size
		t.wants = append(t.wants, n)
	}
	b.refs++ // until the request has ended
	q.runs[u]++
	return t
}

func (q *scheduler) end(t *task, now time.Time) {
	q.runs[t.urgency]--
	if t.urgency == Demand {
		q.lastDemand = now
	}
}
