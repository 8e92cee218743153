// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package link gives connections on the loopback interface the rate and the round trip of a network.
//
// The kernel hands each packet of a shaped port to user space (NFQUEUE in the OUTPUT chain, one queue for each direction), where it
// waits its turn: the time that it takes on a wire of the rate, behind the packets before it, and then half a round trip. Both ends are
// ordinary TCP sockets and meet what they meet on a network: hand-shakes, slow start and congestion control see the link, segments
// have the size that Ethernet allows, and nothing is merged or split on the way.
//
// Only headers are copied, because the measured programs share the processors with the link: it takes about 15 % of one at 1 Gbit/s, and
// nearly nothing at rest. (A round trip that is spent in one direction would halve that, but a connection may not have much more than
// a millisecond's worth of packets in queues of its own machine.)
//
// It changes the firewall of the whole network namespace: use it in one of its own (see package isolate).
package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Shape is what a link is like.
type Shape struct {
	Rate      int64         // bytes a second in each direction, counted with IP headers; positive
	RoundTrip time.Duration // added to that of the loopback interface
}

// segment is TCP's largest payload on Ethernet, with time stamps: 1500 bytes but for the headers.
const segment = 1448

// numbers gives each queue a number of its own.
var numbers atomic.Uint32

// listener is a listener behind a link.
type listener struct {
	net.Listener
	rules  [][]string // of iptables, without the command
	queues []*queue
	once   sync.Once
	closed error
}

// Listen listens on a loopback address ("127.0.0.1:5002") whose connections cross a link. Closing the listener ends the link, also of
// connections that are open. It needs root.
func Listen(ctx context.Context, address string, shape Shape) (_ net.Listener, err error) {
	if shape.Rate <= 0 || shape.RoundTrip < 0 {
		return nil, fmt.Errorf("link: no such shape: %+v", shape)
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var serr error
		err := c.Control(func(fd uintptr) {
			// The loopback interface's own segments are as large as 45 of a network's. Accepted connections inherit it, and the
			// peer is told.
			serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, segment)
		})
		return errors.Join(err, serr)
	}}
	under, err := config.Listen(ctx, "tcp4", address)
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	l := &listener{Listener: under}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	port := under.Addr().(*net.TCPAddr).Port
	for _, match := range []string{"--sport", "--dport"} {
		number := uint16(numbers.Add(1))
		q, err := openQueue(number, shape)
		if err != nil {
			return nil, fmt.Errorf("link: %w", err)
		}
		l.queues = append(l.queues, q)
		rule := []string{"OUTPUT", "-o", "lo", "-p", "tcp", match, strconv.Itoa(port), "-j", "NFQUEUE", "--queue-num", strconv.Itoa(int(number))}
		if err := iptables(ctx, "-A", rule); err != nil {
			return nil, fmt.Errorf("link: %w", err)
		}
		l.rules = append(l.rules, rule)
	}
	return l, nil
}

// Close ends the link. Packets on the way arrive at once.
func (l *listener) Close() error {
	l.once.Do(func() {
		errs := []error{l.Listener.Close()}
		for _, r := range l.rules {
			errs = append(errs, iptables(context.Background(), "-D", r))
		}
		for _, q := range l.queues {
			errs = append(errs, q.close())
		}
		l.closed = errors.Join(errs...)
	})
	return l.closed
}

func iptables(ctx context.Context, action string, rule []string) error {
	out, err := exec.CommandContext(ctx, "iptables", append([]string{"-w", action}, rule...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("iptables %s: %w: %s", action, err, out)
	}
	return nil
}
