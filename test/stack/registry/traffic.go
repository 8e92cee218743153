// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"io"
	"net/http"
	"sync/atomic"
)

// Request is what one request asked for and what it got so far.
type Request struct {
	Method string
	Target
	Query  string // raw
	Range  string // the Range header
	Status int    // 0 while nothing was answered
	// Sent and Received count the bytes of the bodies, also while they are still under way.
	Sent, Received int64
}

// Traffic sums requests up.
type Traffic struct {
	Requests       int
	Sent, Received int64 // bytes of bodies, as the registry sees them
}

// Requests lists the requests since Reset in the order of their arrival.
func (r *Registry) Requests() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Request, len(r.requests))
	for i, entry := range r.requests {
		all[i] = entry.Request
		all[i].Status = int(entry.status.Load())
		all[i].Sent, all[i].Received = entry.sent.Load(), entry.received.Load()
	}
	return all
}

// Traffic sums up the requests since Reset for which keep is true; all for nil.
func (r *Registry) Traffic(keep func(Request) bool) Traffic {
	var sum Traffic
	for _, request := range r.Requests() {
		if keep != nil && !keep(request) {
			continue
		}
		sum.Requests++
		sum.Sent += request.Sent
		sum.Received += request.Received
	}
	return sum
}

// InRepository keeps the requests of one repository, for Traffic.
func InRepository(name string) func(Request) bool {
	return func(r Request) bool { return r.Repository == name }
}

// Reset forgets the requests so far.
func (r *Registry) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = nil
}

// record is a Request under way; its counters are read while the handler still runs.
type record struct {
	Request
	status, sent, received atomic.Int64
}

type countingBody struct {
	io.ReadCloser
	entry *record
}

func (b *countingBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.entry.received.Add(int64(n))
	return n, err
}

type countingWriter struct {
	http.ResponseWriter
	entry *record
}

// Unwrap is for http.ResponseController.
func (w *countingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *countingWriter) WriteHeader(status int) {
	w.entry.status.Store(int64(status))
	w.ResponseWriter.WriteHeader(status)
}

func (w *countingWriter) Write(p []byte) (int, error) {
	w.entry.status.CompareAndSwap(0, http.StatusOK)
	n, err := w.ResponseWriter.Write(p)
	w.entry.sent.Add(int64(n))
	return n, err
}

// step is how much goes out between two updates of the counter: large enough for sendfile(2) to pay off.
const step = 1 << 20

// ReadFrom keeps the server's sendfile path open (benchmarks share two cores with the registry) and still counts as it goes.
func (w *countingWriter) ReadFrom(src io.Reader) (int64, error) {
	w.entry.status.CompareAndSwap(0, http.StatusOK)
	to, ok := w.ResponseWriter.(io.ReaderFrom)
	if !ok {
		return io.Copy(struct{ io.Writer }{w}, src)
	}
	// The server recognises a file behind one LimitedReader only.
	limited, _ := src.(*io.LimitedReader)
	var total int64
	for {
		piece := &io.LimitedReader{R: src, N: step}
		if limited != nil {
			piece = &io.LimitedReader{R: limited.R, N: min(limited.N, step)}
		}
		want := piece.N
		n, err := to.ReadFrom(piece)
		w.entry.sent.Add(n)
		total += n
		if limited != nil {
			limited.N -= n
		}
		if err != nil || n < want || want == 0 {
			return total, err
		}
	}
}
