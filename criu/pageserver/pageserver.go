// SPDX-License-Identifier: Apache-2.0

// Package pageserver is the reading side of CRIU's page-server protocol: it gives
// pages to `criu lazy-pages --page-server`, CRIU's own daemon, which copies them
// into the processes that `criu restore --lazy-pages` made.
//
// A client asks for runs of pages of a process, by the process's number in CRIU's
// images and the address at dump time, and goes on without waiting. It takes the
// answers in the order in which it asked, so a page fault may stand behind a large
// transfer in the background. Requests are therefore handed to the Source as they
// come, within a window, and only answering is done in order.
//
// A client that loses its connection ends, and the kernel then shows zeros where
// its processes miss pages. So no connection is ended for being idle or for having
// to wait: only for what no CRIU sends, for not taking its answers, or at the
// server's end. What a client may take is bounded: connections, requests in work,
// and one buffer of an answer's size each. Clients share nothing else.
//
// The protocol has neither encryption nor authentication. A client on a loopback
// address must be of the server's user; others are as trusted as their network.
package pageserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// Source is where the pages of one checkpoint's processes come from. Its methods
// may be called at the same time.
type Source interface {
	// Await returns when pages can be read, and how many of the count pages of a
	// process from an address on: at least one; fewer than count only if the pages
	// end there. Pages that the process does not have are an error of the class
	// errdefs.ErrNotFound. Errors end the client's connection, and with that most
	// likely its processes: what can still come is waited for.
	Await(ctx context.Context, pid uint32, address uint64, count int) (int, error)
	// Read reads whole pages for which Await has returned.
	Read(pid uint32, address uint64, p []byte) error
}

const (
	// maxConnections bounds the clients of one server.
	maxConnections = 32
	// acceptPause is the wait after an accept failed for want of resources.
	acceptPause = 100 * time.Millisecond
	// complaintPause keeps refused clients from filling the log.
	complaintPause = time.Second
)

// Server serves the pages of one Source.
type Server struct {
	source Source
	// allow returns nil if a client may read.
	allow func(*net.TCPConn) error

	mu      sync.Mutex
	clients map[*client]struct{}
}

// New returns a server.
func New(source Source) *Server {
	return &Server{source: source, allow: sameUser, clients: make(map[*client]struct{})}
}

// Serve serves clients until the context ends. It closes the listener, and
// returns when all connections have ended.
func (s *Server) Serve(ctx context.Context, l *net.TCPListener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	var complained time.Time // about refused clients
	for {
		conn, err := l.AcceptTCP()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return nil
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
			log.G(ctx).WithError(err).Warn("page server: a client must wait")
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		case err != nil:
			return fmt.Errorf("page server: %w", err)
		}
		c := &client{conn: conn, source: s.source, since: time.Now()}
		if err := s.admit(c); err != nil {
			if time.Since(complained) > complaintPause {
				complained = time.Now()
				log.G(ctx).WithError(err).WithField("client", conn.RemoteAddr()).Warn("page server: client refused")
			}
			conn.Close()
			continue
		}
		wg.Go(func() {
			defer s.forget(c)
			lg := log.G(ctx).WithField("client", conn.RemoteAddr())
			if err := c.serve(ctx); err != nil {
				lg.WithError(err).Warn("page server: connection ended: the client's processes miss what they had not got")
				return
			}
			if n := c.sent.Load(); n > 0 {
				lg.WithField("pages", n).Info("page server: client has gone")
			}
		})
	}
}

// admit makes a client known. When there are too many, one that has never asked
// for anything makes room.
func (s *Server) admit(c *client) error {
	if err := s.allow(c.conn); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.clients) >= maxConnections {
		var idle *client
		for o := range s.clients {
			if !o.asked.Load() && (idle == nil || o.since.Before(idle.since)) {
				idle = o
			}
		}
		if idle == nil {
			return fmt.Errorf("%d clients are connected already: %w", len(s.clients), errdefs.ErrResourceExhausted)
		}
		idle.conn.Close()
		delete(s.clients, idle)
	}
	s.clients[c] = struct{}{}
	return nil
}

func (s *Server) forget(c *client) {
	c.conn.Close()
	s.mu.Lock()
	delete(s.clients, c)
	s.mu.Unlock()
}

// client is one connection.
type client struct {
	conn   *net.TCPConn
	source Source
	since  time.Time

	asked atomic.Bool // for anything yet
	sent  atomic.Int64
}
