// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

const (
	// replyTimeout bounds how long the daemon may take to answer.
	replyTimeout = 10 * time.Second
	// Between attempts to connect.
	retryMin = 20 * time.Millisecond
	retryMax = time.Second
)

// Client is a shim's side, for one container. It connects again when the daemon
// was restarted or did not answer. Its methods may be called at the same time.
type Client struct {
	path      string
	container Container
	done      chan struct{} // closed by Done
	loop      sync.WaitGroup
	doneErr   error // of telling the daemon; to be read when loop has ended

	exchanging sync.Mutex // one message at a time

	mu      sync.Mutex
	fds     map[uint64]int // what the daemon is to hold
	link    *link          // nil while there is no connection
	changed chan struct{}  // closed when link changes
	closed  bool
}

// link is one connection.
type link struct {
	conn    *net.UnixConn
	replies chan reply
	broken  chan struct{} // closed when nothing comes any more
}

// Dial connects to the daemon for a container. The first connection must
// succeed: a container must not be restored without a second holder.
func Dial(path string, container Container) (*Client, error) {
	c := &Client{
		path: path, container: container, done: make(chan struct{}),
		fds: make(map[uint64]int), changed: make(chan struct{}),
	}
	l, err := c.connect()
	if err != nil {
		return nil, err
	}
	c.loop.Go(func() { c.stay(l) })
	return c, nil
}

// connect makes a connection, gives the daemon all that it is to hold, and only
// then lets others use the connection: a Forget meanwhile has to come behind it.
func (c *Client) connect() (*link, error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: c.path})
	if err != nil {
		return nil, fmt.Errorf("thaw-snapshotter's keeper (is thaw-snapshotter running?): %w", err)
	}
	l := &link{conn: conn, replies: make(chan reply, 1), broken: make(chan struct{})}
	c.loop.Go(l.read)
	c.exchanging.Lock()
	defer c.exchanging.Unlock()
	c.mu.Lock()
	fds := maps.Clone(c.fds)
	c.mu.Unlock()
	err = l.exchange(message{Container: c.container}, -1)
	for id, fd := range fds {
		if err == nil {
			err = l.exchange(message{Hold: id}, fd)
		}
	}
	if err == nil {
		err = l.exchange(message{Complete: true}, -1)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	c.setLink(l)
	return l, nil
}

// stay keeps the client connected until Done.
func (c *Client) stay(l *link) {
	for {
		wait := retryMin
		for l == nil {
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-c.done:
				t.Stop()
				c.end(nil)
				return
			}
			wait = min(2*wait, retryMax)
			l, _ = c.connect() // nil: try again
		}
		select {
		case <-l.broken:
		case <-c.done:
			c.end(l)
			return
		}
		l.conn.Close()
		c.setLink(nil)
		l = nil
	}
}

// end tells the daemon that it may let go. Without a connection that takes a new
// one: a daemon that lives holds on to what an earlier one brought.
func (c *Client) end(l *link) {
	for again := l != nil; ; again = false {
		if l == nil {
			if l, c.doneErr = c.connect(); l == nil {
				return
			}
		}
		c.exchanging.Lock()
		c.doneErr = l.exchange(message{Done: true}, -1)
		c.exchanging.Unlock()
		l.conn.Close()
		if c.doneErr == nil || !again {
			return
		}
		l = nil
	}
}

func (c *Client) setLink(l *link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link = l
	close(c.changed)
	c.changed = make(chan struct{})
}

// read passes the daemon's answers on until the connection ends.
func (l *link) read() {
	defer close(l.broken)
	buf := make([]byte, maxMessage)
	for {
		n, err := l.conn.Read(buf)
		if err != nil || n == 0 {
			return
		}
		var r reply
		if json.Unmarshal(buf[:n], &r) != nil {
			return
		}
		select {
		case l.replies <- r:
		default:
			return // an answer to no question
		}
	}
}

// exchange sends a message, with a descriptor unless fd is negative, and waits
// for the answer.
func (l *link) exchange(m message, fd int) error {
	p, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	if err := l.conn.SetWriteDeadline(time.Now().Add(replyTimeout)); err != nil {
		return err
	}
	if _, _, err := l.conn.WriteMsgUnix(p, rights, nil); err != nil {
		return err
	}
	t := time.NewTimer(replyTimeout)
	defer t.Stop()
	select {
	case r := <-l.replies:
		return r.err()
	case <-l.broken:
		// The daemon may have answered before it closed the connection.
		select {
		case r := <-l.replies:
			return r.err()
		default:
			return net.ErrClosed
		}
	case <-t.C:
		l.conn.Close()
		return os.ErrDeadlineExceeded
	}
}

// err returns what the daemon refused, if it did.
func (r reply) err() error {
	if r.Error != "" {
		return refusal(r.Error)
	}
	return nil
}

// refusal is what the daemon itself answered.
type refusal string

func (r refusal) Error() string { return "thaw-snapshotter's keeper: " + string(r) }

// send sends a message over the connection there is, or the next one.
func (c *Client) send(ctx context.Context, m message, fd int) error {
	for {
		c.mu.Lock()
		l, changed, closed := c.link, c.changed, c.closed
		c.mu.Unlock()
		if closed {
			return net.ErrClosed
		}
		if l != nil {
			c.exchanging.Lock()
			err := l.exchange(m, fd)
			c.exchanging.Unlock()
			var r refusal
			if err == nil || errors.As(err, &r) {
				return err
			}
			l.conn.Close()
		}
		select {
		case <-changed:
		case <-c.done:
			return net.ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Hold gives the daemon a duplicate of a descriptor under a number of the
// caller's, who keeps its own open until after Forget or Done. It returns when the
// daemon has it or has refused it, which is logged, or when the context ends: a
// daemon that is away then gets it when it is back.
func (c *Client) Hold(ctx context.Context, id uint64, fd int) {
	c.mu.Lock()
	c.fds[id] = fd
	c.mu.Unlock()
	var r refusal
	if err := c.send(ctx, message{Hold: id}, fd); errors.As(err, &r) {
		c.drop(id)
		log.G(ctx).WithError(err).WithField("restore", c.container.RestoreID).Warn("thaw: the daemon does not hold a userfaultfd")
	}
}

// Forget makes the daemon close a descriptor that nobody depends on any more. It
// returns when that is done, or when the context ends or after Done, which lets go of
// all; in any case the caller may close its own then.
func (c *Client) Forget(ctx context.Context, id uint64) {
	c.drop(id)
	if ctx.Err() == nil {
		_ = c.send(ctx, message{Forget: id}, -1) // the daemon refuses none
	}
}

// drop takes a descriptor from what connections begin with. A connection that is
// being made may still send it, so the number must not be another file's before.
func (c *Client) drop(id uint64) {
	c.mu.Lock()
	delete(c.fds, id)
	c.mu.Unlock()
	c.exchanging.Lock()
	defer c.exchanging.Unlock()
}

// Done tells the daemon that no page is missing any more, or that no process is
// left, and ends the client. It may be called more than once.
func (c *Client) Done() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if !closed {
		close(c.done)
	}
	c.loop.Wait()
	return c.doneErr
}
