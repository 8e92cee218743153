// SPDX-License-Identifier: Apache-2.0

package pageblob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"runtime"
	"sync"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/seal"
)

// Options say how a Writer works.
type Options struct {
	// Open returns the sink of the next blob. It is called when the first chunk
	// is to be written to it, never concurrently, and not at all if there is
	// nothing to store.
	Open func() (Sink, error)
	// MaxBlob is the size in bytes at which a blob is closed and the next one
	// begun; a blob may be longer by less than a chunk. Zero means 4 GiB.
	MaxBlob int64
	// Known are chunks that need not be written.
	Known *Known
	// Seal encrypts each blob with a key of its own; see Writer.Keys. Known must be
	// empty then.
	Seal bool
	// Progress is called after each chunk with what has been done so far, from
	// one goroutine.
	Progress func(Stats)
}

// defaultMaxBlob keeps blobs below the layer size limits that registries have
// (5 GiB for one S3 upload, 10 GiB at some hosts).
const defaultMaxBlob = 4 << 30

// Stats count what a Writer did, in bytes.
type Stats struct {
	Pages      int64 // pages taken, zero pages included
	Zero       int64 // of them all zero
	Compressed int64 // written to sinks
	Reused     int64 // uncompressed content found in a Known blob
	Repeated   int64 // uncompressed content found in a chunk written before
	Chunks     int64 // number of chunks written
}

// Writer cuts the pages of processes into chunks, compresses these on all
// cores, streams them in order to sinks and makes the page index. Memory is
// bounded by a few chunks for each core and the index itself.
//
// Begin, Add, Close and Abort must be called from one goroutine. Close or Abort
// must be called, or goroutines leak.
type Writer struct {
	opts   Options
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	work    chan *job // to the compressing goroutines
	ordered chan *job // the same jobs to the emitting goroutine
	free    sync.Pool // of *job

	// The builder's state, of the calling goroutine.
	closed    bool
	current   *job
	processes []process
	next      uint64 // address behind the last page of the process
	jobs      int    // number of chunks handed on
	zero      int64

	// The emitter's state; read by Close after it has ended.
	emit emitter
}

// process is a pageindex.Process whose chunks have no place yet.
type process struct {
	pid  uint32
	runs []run
}

// run is a run of pages in one chunk, or of zero pages.
type run struct {
	start, pages uint64
	chunk        int // running number, or -1 for zero pages
	page         int // first page in the chunk
}

const zeroRun = -1

// job is one chunk on its way.
type job struct {
	content []byte
	// boundary is the number of pages in content before the last one whose
	// address is a multiple of the chunk size, if that is not the first.
	boundary int
	frame    []byte
	sum      [sha256.Size]byte
	err      error
	done     chan struct{} // has room for one: frame, sum and err are set
	zero     int64         // bytes of zero pages that the builder had seen by then
}

// NewWriter returns a writer. When ctx is cancelled, Add and Close fail.
func NewWriter(ctx context.Context, opts Options) *Writer {
	if opts.MaxBlob <= 0 {
		opts.MaxBlob = defaultMaxBlob
	}
	if opts.Known == nil {
		opts.Known = &Known{}
	}
	n := runtime.GOMAXPROCS(0)
	w := &Writer{
		opts:    opts,
		work:    make(chan *job, n),
		ordered: make(chan *job, 4*n),
	}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.free.New = func() any {
		return &job{content: make([]byte, 0, ChunkPages*pageindex.PageSize), done: make(chan struct{}, 1)}
	}
	w.emit = emitter{opts: &w.opts, sum: sha256.New(), written: make(map[[sha256.Size]byte]place)}
	for range n {
		w.wg.Go(w.compress)
	}
	w.wg.Go(w.emitAll)
	return w
}

// Begin starts the next process. PIDs must ascend.
func (w *Writer) Begin(pid uint32) error {
	if w.closed {
		return ErrClosed
	}
	if n := len(w.processes); n > 0 && pid <= w.processes[n-1].pid {
		return fmt.Errorf("process %d after process %d", pid, w.processes[n-1].pid)
	}
	// A chunk holds pages of one process only: then what one process does to
	// its memory leaves the chunks of the next ones as they were.
	if err := w.flush(); err != nil {
		return err
	}
	w.processes = append(w.processes, process{pid: pid})
	w.next = 0
	return nil
}

var zeroPage [pageindex.PageSize]byte

// Add takes pages of the process, which lie at the virtual address addr and
// behind all that were given before. The content is copied. An error is final,
// and may be that of a sink.
func (w *Writer) Add(addr uint64, pages []byte) error {
	switch {
	case w.closed:
		return ErrClosed
	case len(w.processes) == 0:
		return fmt.Errorf("pages at %#x belong to no process", addr)
	case addr%pageindex.PageSize != 0 || len(pages)%pageindex.PageSize != 0:
		return fmt.Errorf("%d bytes at %#x are no whole pages", len(pages), addr)
	case addr < w.next:
		return fmt.Errorf("pages at %#x come behind those up to %#x", addr, w.next)
	}
	for ; len(pages) > 0; pages = pages[pageindex.PageSize:] {
		page := pages[:pageindex.PageSize]
		if bytes.Equal(page, zeroPage[:]) {
			w.zero += pageindex.PageSize
			w.note(addr, zeroRun, 0)
		} else if err := w.store(addr, page); err != nil {
			return err
		}
		addr += pageindex.PageSize
	}
	w.next = addr
	return nil
}

// note records where a page is.
func (w *Writer) note(addr uint64, chunk, page int) {
	p := &w.processes[len(w.processes)-1]
	if n := len(p.runs); n > 0 {
		r := &p.runs[n-1]
		if r.start+r.pages*pageindex.PageSize == addr && r.chunk == chunk && (chunk == zeroRun || r.page+int(r.pages) == page) {
			r.pages++
			return
		}
	}
	p.runs = append(p.runs, run{start: addr, pages: 1, chunk: chunk, page: page})
}

// store puts a page into the current chunk. Where chunks end depends on
// addresses, so that memory which did not change between two checkpoints falls
// into the same chunks again even if there is more or less before it: a chunk
// ends before an address that is a multiple of the chunk size if it is at least
// half full; and one that fills up elsewhere is cut at the last such address.
func (w *Writer) store(addr uint64, page []byte) error {
	const block = ChunkPages * pageindex.PageSize
	aligned := addr%block == 0
	if w.current != nil {
		n := w.pagesInCurrent()
		switch {
		case n == ChunkPages && !aligned && w.current.boundary > 0:
			if err := w.cut(w.current.boundary); err != nil {
				return err
			}
		case n == ChunkPages, aligned && n >= ChunkPages/2:
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	if w.current == nil {
		w.current = w.free.Get().(*job)
	}
	n := w.pagesInCurrent()
	if aligned {
		w.current.boundary = n
	}
	w.current.content = append(w.current.content, page...)
	w.note(addr, w.jobs, n)
	return nil
}

func (w *Writer) pagesInCurrent() int { return len(w.current.content) / pageindex.PageSize }

// cut hands on the first pages of the current chunk; the others become the
// beginning of the next.
func (w *Writer) cut(pages int) error {
	rest := w.free.Get().(*job)
	rest.content = append(rest.content, w.current.content[pages*pageindex.PageSize:]...)
	w.current.content = w.current.content[:pages*pageindex.PageSize]
	// Runs of the current chunk are at the end of the process's list, mixed
	// with those of zero pages. The one with the chunk's first page is found
	// last.
	p := &w.processes[len(w.processes)-1]
	i := len(p.runs) - 1
	for p.runs[i].chunk != w.jobs || p.runs[i].page != 0 {
		i--
	}
	moved := make([]run, 0, len(p.runs)-i+1)
	for _, r := range p.runs[i:] {
		end := r.page + int(r.pages)
		switch {
		case r.chunk == zeroRun || end <= pages:
			moved = append(moved, r)
		case r.page >= pages:
			moved = append(moved, run{start: r.start, pages: r.pages, chunk: w.jobs + 1, page: r.page - pages})
		default:
			before := uint64(pages - r.page)
			moved = append(moved,
				run{start: r.start, pages: before, chunk: w.jobs, page: r.page},
				run{start: r.start + before*pageindex.PageSize, pages: r.pages - before, chunk: w.jobs + 1})
		}
	}
	p.runs = append(p.runs[:i], moved...)
	if err := w.flush(); err != nil {
		return err
	}
	w.current = rest
	return nil
}

// flush hands the current chunk on.
func (w *Writer) flush() error {
	j := w.current
	if j == nil {
		return nil
	}
	w.current = nil
	w.jobs++
	j.zero = w.zero
	for _, ch := range []chan *job{w.ordered, w.work} {
		select {
		case ch <- j:
		case <-w.ctx.Done():
			return context.Cause(w.ctx)
		}
	}
	return nil
}

func (w *Writer) compress() {
	for j := range w.work {
		j.frame, j.err = Encode(j.frame[:0], j.content)
		j.sum = sha256.Sum256(j.frame)
		j.done <- struct{}{}
	}
}

func (w *Writer) emitAll() {
	for {
		select {
		case j, ok := <-w.ordered:
			if !ok {
				return
			}
			select {
			case <-j.done:
			case <-w.ctx.Done():
				return
			}
			err := j.err
			if err == nil {
				err = w.emit.chunk(j)
			}
			if err != nil {
				w.cancel(err)
				return
			}
			w.recycle(j)
		case <-w.ctx.Done():
			return
		}
	}
}

func (w *Writer) recycle(j *job) {
	j.content, j.boundary = j.content[:0], 0
	w.free.Put(j)
}

// stop ends the goroutines and waits for them.
func (w *Writer) stop() {
	w.closed = true
	close(w.work)
	close(w.ordered)
	w.wg.Wait()
}

// Abort gives up: the open sink is aborted with the cause. It does nothing
// after Close.
func (w *Writer) Abort(cause error) {
	if w.closed {
		return
	}
	w.cancel(cause)
	w.stop()
	w.emit.abort(cause)
}

// Close writes what is left and returns the page index with its new blobs
// first, in the order in which they were opened, and then the known ones that
// it refers to; and how many of its blobs are new.
func (w *Writer) Close() (index *pageindex.Index, fresh int, stats Stats, err error) {
	if w.closed {
		return nil, 0, Stats{}, ErrClosed
	}
	err = w.flush()
	w.stop()
	if err == nil {
		err = context.Cause(w.ctx) // nil unless cancelled, or the emitter failed
	}
	if err == nil {
		err = w.emit.finish()
	}
	w.cancel(nil)
	if err != nil {
		w.emit.abort(err)
		return nil, 0, w.stats(), err
	}
	return w.index(), len(w.emit.blobs), w.stats(), nil
}

// Keys returns, after Close, the keys of the index's blobs if they are encrypted.
func (w *Writer) Keys() []*seal.Blob { return w.emit.keys }

func (w *Writer) stats() Stats {
	s := w.emit.stats // its Pages are those in chunks
	s.Zero = w.zero
	s.Pages += w.zero
	return s
}

// index joins the builder's runs and the emitter's places.
func (w *Writer) index() *pageindex.Index {
	x := &pageindex.Index{Blobs: w.emit.blobs}
	old := make(map[int]int) // index into Known.blobs -> into x.Blobs
	for _, p := range w.processes {
		out := pageindex.Process{PID: p.pid}
		for _, r := range p.runs {
			n := pageindex.Run{Start: r.start, Pages: r.pages, Blob: pageindex.Zero}
			if r.chunk != zeroRun {
				at := w.emit.places[r.chunk]
				n.Blob, n.Page = at.blob, at.page+uint64(r.page)
				if at.old {
					i, ok := old[at.blob]
					if !ok {
						i = len(x.Blobs)
						old[at.blob] = i
						x.Blobs = append(x.Blobs, w.opts.Known.blobs[at.blob])
					}
					n.Blob = i
				}
			}
			out.Runs = appendRun(out.Runs, n)
		}
		x.Processes = append(x.Processes, out)
	}
	return x
}

// appendRun appends a run, or lengthens the last one if it goes on.
func appendRun(runs []pageindex.Run, r pageindex.Run) []pageindex.Run {
	if n := len(runs); n > 0 {
		last := &runs[n-1]
		if last.End() == r.Start && last.Blob == r.Blob && (r.Blob == pageindex.Zero || last.Page+last.Pages == r.Page) {
			last.Pages += r.Pages
			return runs
		}
	}
	return append(runs, r)
}

// emitter writes chunks in their order, each once.
type emitter struct {
	opts    *Options
	sink    Sink // of the blob that is being written, or nil
	sum     hash.Hash
	size    int64
	pages   uint64
	chunks  []pageindex.Chunk
	blobs   []pageindex.Blob // finished
	keys    []*seal.Blob     // of the blobs, that of the sink included, if they are encrypted
	sealed  []byte
	written map[[sha256.Size]byte]place
	places  []place // of each chunk by its running number
	stats   Stats
}

func (e *emitter) chunk(j *job) error {
	n := uint32(len(j.content) / pageindex.PageSize)
	at, repeated := e.written[j.sum]
	old, known := e.opts.Known.chunks[j.sum]
	switch {
	// The number of pages is compared because it is the word of an earlier
	// index; equal frames have equal content.
	case repeated:
		e.stats.Repeated += int64(len(j.content))
	case known && old.pages == n:
		at = old
		e.stats.Reused += int64(len(j.content))
	default:
		at = place{blob: len(e.blobs), page: e.pages, pages: n}
		if err := e.write(j.sum, j.frame, n); err != nil {
			return err
		}
		e.written[j.sum] = at
	}
	e.places = append(e.places, at)
	e.stats.Pages += int64(len(j.content))
	if e.opts.Progress != nil {
		s := e.stats
		s.Zero = j.zero
		s.Pages += s.Zero
		e.opts.Progress(s)
	}
	if e.size >= e.opts.MaxBlob {
		return e.finish()
	}
	return nil
}

// write writes a frame with that digest, which holds so many pages.
func (e *emitter) write(sum [sha256.Size]byte, frame []byte, pages uint32) error {
	if e.sink == nil {
		s, err := e.opts.Open()
		if err != nil {
			return err
		}
		e.sink = s
		if e.opts.Seal {
			e.keys = append(e.keys, seal.NewBlob(seal.NewKey()))
		}
	}
	if e.opts.Seal {
		e.sealed = e.keys[len(e.keys)-1].Seal(e.sealed[:0], frame, len(e.chunks), pages)
		frame, sum = e.sealed, sha256.Sum256(e.sealed)
	}
	c := pageindex.Chunk{SHA256: sum, Size: uint32(len(frame)), Pages: pages}
	if _, err := e.sink.Write(frame); err != nil {
		return err
	}
	e.sum.Write(frame)
	e.size += int64(len(frame))
	e.pages += uint64(c.Pages)
	e.chunks = append(e.chunks, c)
	e.stats.Compressed += int64(len(frame))
	e.stats.Chunks++
	return nil
}

// finish commits the blob that is being written, if there is one.
func (e *emitter) finish() error {
	if e.sink == nil {
		return nil
	}
	b, err := pageindex.NewBlob(digest.NewDigest(digest.SHA256, e.sum), e.chunks)
	if err != nil {
		return err
	}
	sink := e.sink
	e.sink = nil
	if err := sink.Commit(b.Digest, e.size); err != nil {
		return err
	}
	e.blobs = append(e.blobs, b)
	e.sum.Reset()
	e.size, e.pages, e.chunks = 0, 0, nil
	return nil
}

func (e *emitter) abort(cause error) {
	if e.sink != nil {
		e.sink.Abort(cause)
		e.sink = nil
	}
}
