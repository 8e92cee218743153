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

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

const (
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
	kill func(ctx context.Context, c Container, init *os.File) error

	mu    sync.Mutex
	conns map[*net.UnixConn]struct{}
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
	return &Server{l: l, kill: kill, conns: make(map[*net.UnixConn]struct{})}, nil
}

// Serve serves until the context is cancelled. The descriptors that it holds
// then are closed without killing anybody: the shims live and have their own.
func (s *Server) Serve(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.close)()
	for {
		c, err := s.l.AcceptUnix()
		if err != nil {
			s.close()
			s.wg.Wait()
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("keeper: %w", err)
		}
		if !s.add(c) {
			c.Close()
			continue
		}
		s.wg.Go(func() {
			defer s.remove(c)
			s.serve(ctx, c)
		})
	}
}

func (s *Server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop = true
	s.l.Close()
	for c := range s.conns {
		c.Close()
	}
}

func (s *Server) add(c *net.UnixConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop || !samePeer(c) {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) remove(c *net.UnixConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	c.Close()
}

// stopping reports whether connections end because the daemon does.
func (s *Server) stopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stop
}

// samePeer reports whether the other end belongs to this user.
func samePeer(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil || err != nil {
		return false
	}
	return cred.Uid == uint32(os.Geteuid())
}

// held is what the daemon has of one container.
type held struct {
	container Container
	fds       map[uint64]int // by the client's number
	init      *os.File       // pidfd of the first process
}

// close closes the descriptors; nobody may depend on them any more.
func (h *held) close() {
	for _, fd := range h.fds {
		unix.Close(fd)
	}
	h.fds = nil
	if h.init != nil {
		h.init.Close()
		h.init = nil
	}
}

func (s *Server) serve(ctx context.Context, c *net.UnixConn) {
	h := &held{fds: make(map[uint64]int)}
	defer h.close()
	done, err := h.serve(c)
	if done || s.stopping() || len(h.fds) == 0 && len(h.container.Cgroups) == 0 && h.init == nil {
		return
	}
	lg := log.G(ctx).WithField("restore", h.container.RestoreID)
	lg.WithError(err).Error("the container's page handler is gone while pages may be missing: the container is killed")
	// Not ended by the daemon's stop: descriptors close only behind it.
	if err := s.kill(context.WithoutCancel(ctx), h.container, h.init); err != nil {
		lg.WithError(err).Error("container not killed: its descriptors stay open")
		h.fds = nil // leaked on purpose: a thread that waits forever beats one that reads zeros
	}
}

// serve handles one connection's messages until it ends; done says that it did
// so in good order.
func (h *held) serve(c *net.UnixConn) (done bool, err error) {
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxFDs*4))
	for {
		n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
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
			_, _ = c.Write(p)
			return true, nil
		}
		if _, err := c.Write(p); err != nil {
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
	if m.Hold != 0 && len(h.container.Cgroups) == 0 && h.init == nil {
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
		h.container.RestoreID = c.RestoreID
	}
	if len(c.Cgroups) > 0 {
		h.container.Cgroups = c.Cgroups
	}
	if c.InitPID > 0 && c.InitPID != h.container.InitPID {
		// Now, while the shim vouches for the number.
		fd, err := unix.PidfdOpen(c.InitPID, 0)
		if err != nil {
			return fmt.Errorf("process %d: %w", c.InitPID, err)
		}
		if h.init != nil {
			h.init.Close()
		}
		h.init, h.container.InitPID = os.NewFile(uintptr(fd), "pidfd"), c.InitPID
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
