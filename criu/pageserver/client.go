// SPDX-License-Identifier: Apache-2.0

package pageserver

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

const (
	// requestTimeout is how long a request may take to arrive from its first byte on.
	requestTimeout = 10 * time.Second
	// answerTimeout is how long a client may take nothing of an answer: it may be
	// stopped for a while, by a debugger say.
	answerTimeout = 5 * time.Minute
	// closeTimeout is how long a client that has said goodbye may take to go.
	closeTimeout = 10 * time.Second

	// windowPages and windowRequests bound what a client has in work.
	windowPages    = 2 * MaxPages
	windowRequests = 256
)

// answer is what a request gets.
type answer struct {
	request request
	ready   chan struct{} // closed when pages and err are set
	pages   int
	err     error
}

// weight is the request's share of the window.
func (r request) weight() int64 { return int64(min(r.pages, MaxPages)) }

// serve answers a client until it goes or the context ends, which are no errors.
func (c *client) serve(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer stop()
	in := bufio.NewReaderSize(c.conn, 4096)
	form, err := c.recognise(in)
	if err != nil {
		return hidden(ctx, err)
	}
	window := semaphore.NewWeighted(windowPages)
	answers := make(chan *answer, windowRequests)
	g.Go(func() error {
		defer close(answers)
		return c.read(ctx, g, in, form, window, answers)
	})
	g.Go(func() error { return c.write(ctx, form, window, answers) })
	return hidden(ctx, g.Wait())
}

// errGone ends a connection whose client has closed it.
var errGone = errors.New("client is gone")

// hidden turns the ordinary ends of a connection into nil.
func hidden(ctx context.Context, err error) error {
	if errors.Is(err, errGone) || errors.Is(err, net.ErrClosed) || errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return nil
	}
	return err
}

// recognise waits for the first request and tells its form.
func (c *client) recognise(in *bufio.Reader) (form, error) {
	p, err := c.peek(in, int(compact))
	if err != nil {
		return 0, err
	}
	c.asked.Store(true)
	return formOf(p), nil
}

// peek waits as long as it takes for the first of n bytes, and not long for the
// rest.
func (c *client) peek(in *bufio.Reader, n int) ([]byte, error) {
	_, err := in.Peek(1)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errGone, err)
	}
	if in.Buffered() < n {
		if err := c.conn.SetReadDeadline(time.Now().Add(requestTimeout)); err != nil {
			return nil, err
		}
	}
	p, err := in.Peek(n)
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: %d bytes of %d", ErrProtocol, len(p), n)
	}
	if err != nil {
		return nil, err
	}
	return p, c.conn.SetReadDeadline(time.Time{})
}

// read takes requests and has the source get ready for them.
func (c *client) read(ctx context.Context, g *errgroup.Group, in *bufio.Reader, f form, window *semaphore.Weighted, answers chan<- *answer) error {
	for {
		p, err := c.peek(in, int(f))
		if err != nil {
			return err
		}
		r, err := f.parse(p)
		if err != nil {
			return err
		}
		if _, err := in.Discard(int(f)); err != nil {
			return err
		}
		a := &answer{request: r, ready: make(chan struct{})}
		if r.command != commandGet {
			close(a.ready)
			select {
			case answers <- a:
			case <-ctx.Done():
				return ctx.Err()
			}
			return c.drain(in)
		}
		if err := window.Acquire(ctx, r.weight()); err != nil {
			return err
		}
		g.Go(func() error {
			defer close(a.ready)
			a.pages, a.err = c.source.Await(ctx, uint32(r.pid), r.address, int(r.weight()))
			return nil
		})
		select {
		case answers <- a:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drain waits until a client that has said goodbye closes, or for closeTimeout
// after it was answered, so that it is the one whose side of the connection lingers.
func (c *client) drain(in *bufio.Reader) error {
	_, err := io.Copy(io.Discard, io.LimitReader(in, 4096))
	return errors.Join(errGone, err)
}

// write sends the answers in the order of the requests.
func (c *client) write(ctx context.Context, f form, window *semaphore.Weighted, answers <-chan *answer) error {
	var buf []byte
	for a := range answers {
		select {
		case <-a.ready:
		case <-ctx.Done():
			return ctx.Err()
		}
		if a.err != nil {
			return a.err
		}
		last := a.request.command != commandGet
		if last {
			// Status 0: all is well.
			buf = binary.NativeEndian.AppendUint32(buf[:0], 0)
		} else {
			var err error
			if buf, err = c.fill(buf, f, a); err != nil {
				return err
			}
		}
		if err := c.send(buf); err != nil {
			return err
		}
		if last {
			return c.conn.SetReadDeadline(time.Now().Add(closeTimeout))
		}
		c.sent.Add(int64(a.pages))
		window.Release(a.request.weight())
	}
	return nil
}

// fill puts an answer with its pages into buf.
func (c *client) fill(buf []byte, f form, a *answer) ([]byte, error) {
	if a.pages <= 0 || a.pages > MaxPages {
		return nil, fmt.Errorf("source has %d pages at %#x of process %d", a.pages, a.request.address, a.request.pid)
	}
	r := a.request
	r.command, r.pages = commandAdd|flagPresent, uint64(a.pages)
	n := int(f) + a.pages*PageSize
	if cap(buf) < n {
		buf = make([]byte, 0, n)
	}
	buf = f.append(buf[:0], r)[:n]
	return buf, c.source.Read(uint32(r.pid), r.address, buf[f:])
}

// send writes all of p as long as the client goes on taking it.
func (c *client) send(p []byte) error {
	for len(p) > 0 {
		if err := c.conn.SetWriteDeadline(time.Now().Add(answerTimeout)); err != nil {
			return err
		}
		n, err := c.conn.Write(p)
		p = p[n:]
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && n == 0:
			return fmt.Errorf("client takes no answer: %w", err)
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return fmt.Errorf("%w: %w", errGone, err)
		}
	}
	return nil
}
