// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

const (
	// acceptPause is how long the daemon waits for free file descriptors.
	acceptPause = 100 * time.Millisecond
	// maxHeld bounds the descriptors held for one container.
	maxHeld = 1 << 16
	// maxFDs is the most descriptors that one packet may carry (Linux,
	// SCM_MAX_FD): whatever comes must be received to be closed.
	maxFDs = 253
)

// Server is the daemon's side.
type Server struct {
	l  *net.UnixListener
	wg sync.WaitGroup

	// kill is a variable for tests.
	kill func(ctx context.Context, cgroups []string) error

	mu    sync.Mutex
	links map[*held]struct{} // those that are connected, and those that hold on
	count uint64             // of connections so far
	stop  bool
}

// Listen makes the socket, for this user alone, in place of a stale one. Serve
// it.
func Listen(path string) (*Server, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("keeper: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("keeper: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		return nil, fmt.Errorf("keeper: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("keeper: %w", err), l.Close())
	}
	return &Server{l: l, kill: Kill, links: make(map[*held]struct{})}, nil
}

// Serve serves until the context is cancelled. The descriptors that it holds
// then are closed without killing anybody: the shims live and have their own.
func (s *Server) Serve(ctx context.Context) error {
	links, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, s.close)()
	for {
		c, err := s.l.AcceptUnix()
		if ctx.Err() == nil && (errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)) {
			// What is held is worth more than who comes: they try again.
			log.G(ctx).WithError(err).Error("keeper: no connection can be taken (raise LimitNOFILE in thaw-snapshotter's unit)")
			select {
			case <-ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		if err != nil {
			cancel()
			s.close()
			s.wg.Wait()
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("keeper: %w", err)
		}
		h, err := s.add(links, c)
		if err != nil {
			c.Close()
			log.G(ctx).WithError(err).Warn("keeper: connection refused")
			continue
		}
		s.wg.Go(func() {
			defer s.remove(h)
			s.serve(ctx, h)
		})
	}
}

func (s *Server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop = true
	s.l.Close()
	for h := range s.links {
		h.conn.Close()
	}
}

func (s *Server) add(ctx context.Context, c *net.UnixConn) (*held, error) {
	p, err := peerOf(c)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop {
		return nil, errors.Join(net.ErrClosed, p.fd.Close())
	}
	s.count++
	h := &held{conn: c, peer: p, number: s.count, fds: make(map[uint64]int)}
	h.ctx, h.letGo = context.WithCancel(ctx)
	s.links[h] = struct{}{}
	return h, nil
}

func (s *Server) remove(h *held) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.links, h)
	h.close()
}

// completed lets go of what is held for earlier connections of a process and
// restore, because h has all of it now.
func (s *Server) completed(h *held) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for old := range s.links {
		if h.follows(old) {
			old.letGo()
		}
	}
}

// useless reports whether a connection that broke before it was complete brought
// nothing, or an earlier one is still held: with all that each of many attempts
// brings, the daemon would reach its limit of open files.
func (s *Server) useless(h *held) bool {
	if h.complete {
		return false
	}
	if len(h.fds) == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for old := range s.links {
		if h.follows(old) {
			return true
		}
	}
	return false
}

// held is what the daemon has of one container by one connection.
type held struct {
	conn    *net.UnixConn
	peer    peer
	number  uint64          // of the connection, in the order in which they came
	ctx     context.Context // ends when nothing needs to be held any more
	letGo   context.CancelFunc
	fds     map[uint64]int // by the client's number
	cgroups []string

	complete bool // fds is all that there is

	mu        sync.Mutex
	restoreID string
}

func (h *held) restore() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.restoreID
}

// follows reports whether a connection is a later one of the same process and
// restore.
func (h *held) follows(old *held) bool {
	return h.number > old.number && h.peer.pid == old.peer.pid && h.restore() == old.restore()
}

// close closes all; nobody may depend on the descriptors any more.
func (h *held) close() {
	h.letGo()
	for _, fd := range h.fds {
		unix.Close(fd)
	}
	h.fds = nil
	h.conn.Close()
	h.peer.fd.Close()
}

func (s *Server) serve(ctx context.Context, h *held) {
	done, err := s.messages(h)
	if done || len(h.cgroups) == 0 || s.useless(h) {
		return
	}
	lg := log.G(ctx).WithField("restore", h.restore())
	h.conn.Close()
	if !h.peer.awaitDeath(h.ctx) {
		return
	}
	lg.WithError(err).Error("the container's page handler is dead while pages may be missing: the container is killed")
	// Not ended by the daemon's stop: descriptors close only behind it.
	if err := s.kill(context.WithoutCancel(ctx), h.cgroups); err != nil {
		lg.WithError(err).Error("container not killed: its descriptors stay open")
		h.fds = nil // leaked on purpose: a thread that waits forever beats one that reads zeros
	}
}

// messages handles one connection's messages until it ends; done says that it
// did so in good order.
func (s *Server) messages(h *held) (done bool, err error) {
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxFDs*4))
	for {
		n, oobn, flags, _, err := h.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			return false, err
		}
		if n == 0 && oobn == 0 {
			return false, io.EOF
		}
		fds, ferr := parseRights(oob[:oobn])
		var m message
		switch {
		case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
			ferr = errors.New("the message was cut off: the daemon may be at its limit of open files")
		case ferr == nil:
			ferr = json.Unmarshal(buf[:n], &m)
		}
		if ferr == nil && !m.Done {
			ferr = h.update(m.Container)
		}
		if ferr == nil {
			ferr = h.take(m, fds)
			fds = nil
		}
		closeAll(fds)
		if ferr == nil && m.Complete {
			h.complete = true
			s.completed(h)
		}
		var r reply
		if ferr != nil {
			r.Error = ferr.Error()
		}
		p, err := json.Marshal(r)
		if err != nil {
			return false, err
		}
		if ferr == nil && m.Done {
			// The answer tells nobody anything that matters any more.
			_, _ = h.conn.Write(p)
			return true, nil
		}
		if _, err := h.conn.Write(p); err != nil {
			return false, err
		}
	}
}

// take does what a message asks for about descriptors, and owns those that came
// with it.
func (h *held) take(m message, fds []int) error {
	if m.Hold == 0 && len(fds) != 0 || m.Hold != 0 && len(fds) != 1 {
		closeAll(fds)
		return fmt.Errorf("%d descriptors came with the message", len(fds))
	}
	if m.Hold != 0 && len(h.cgroups) == 0 {
		closeAll(fds)
		return errors.New("no cgroup says whose memory the descriptor fills, so nobody could be killed before it closes")
	}
	if m.Forget != 0 {
		if fd, ok := h.fds[m.Forget]; ok {
			unix.Close(fd)
			delete(h.fds, m.Forget)
		}
	}
	if m.Hold == 0 {
		return nil
	}
	if fd, ok := h.fds[m.Hold]; ok {
		unix.Close(fd) // a client that connected again sends some twice
	} else if len(h.fds) >= maxHeld {
		closeAll(fds)
		return fmt.Errorf("more than %d descriptors", maxHeld)
	}
	h.fds[m.Hold] = fds[0]
	return nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func (h *held) update(c Container) error {
	for _, g := range c.Cgroups {
		if !cgroupPath(g) {
			return fmt.Errorf("%.100q is no cgroup", g)
		}
	}
	if c.RestoreID != "" {
		h.mu.Lock()
		h.restoreID = c.RestoreID
		h.mu.Unlock()
	}
	if len(c.Cgroups) > 0 {
		h.cgroups = c.Cgroups
	}
	return nil
}

// cgroupPath reports whether a path is that of a cgroup below the root, which
// holds everybody.
func cgroupPath(p string) bool {
	rest, ok := strings.CutPrefix(p, cgroupRoot+"/")
	return ok && filepath.Clean(p) == p && rest != ""
}

func parseRights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, err
		}
		fds = append(fds, got...)
	}
	return fds, nil
}
