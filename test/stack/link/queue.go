// SPDX-License-Identifier: Apache-2.0

//go:build linux

package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// The part of nfnetlink_queue (linux/netfilter/nfnetlink_queue.h) that is needed. Numbers are in network order but for netlink's own.
const (
	subsystem = 3 // NFNL_SUBSYS_QUEUE

	msgPacket       = subsystem << 8
	msgConfig       = subsystem<<8 | 2
	msgVerdictBatch = subsystem<<8 | 3

	configCommand  = 1 // NFQA_CFG_CMD
	configParams   = 2
	configMaxLen   = 3
	configMask     = 4
	configFlags    = 5
	commandBind    = 1
	flagGSO        = 1 << 2 // super-packets are passed on whole
	copyPacket     = 2
	attrPacketHdr  = 1
	attrVerdictHdr = 2
	attrLength     = 13 // NFQA_CAP_LEN: the packet's length, if it was not copied whole
	verdictAccept  = 1

	netlinkHeader = 16 + 4 // nlmsghdr, nfgenmsg
	// copied is the least that makes the kernel tell a packet's length.
	copied = 20
	// capacity is in packets; the senders' own limits are far below.
	capacity = 4096
)

// packet is one that waits.
type packet struct {
	id  uint32
	due time.Time
}

// queue is one direction of a link.
type queue struct {
	number uint16
	shape  Shape
	socket int
	wake   *os.File // readable when the queue is to end
	end    *os.File
	done   chan error

	free    time.Time // when the wire has sent all packets so far
	waiting []packet  // by due, which is also by ID
}

func openQueue(number uint16, shape Shape) (_ *queue, err error) {
	q := &queue{number: number, shape: shape, done: make(chan error, 1)}
	if q.socket, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(q.socket)
		}
	}()
	if err := unix.Bind(q.socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	// A burst of packets must not be lost here.
	if err := unix.SetsockoptInt(q.socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20); err != nil {
		return nil, fmt.Errorf("netlink: receive buffer: %w", err)
	}
	params := append(binary.BigEndian.AppendUint32(nil, copied), copyPacket)
	for _, attrs := range [][]byte{
		attribute(nil, configCommand, []byte{commandBind, 0, 0, unix.AF_INET}),
		attribute(nil, configParams, params),
		attribute(nil, configMaxLen, binary.BigEndian.AppendUint32(nil, capacity)),
		attribute(attribute(nil, configFlags, binary.BigEndian.AppendUint32(nil, flagGSO)), configMask, binary.BigEndian.AppendUint32(nil, flagGSO)),
	} {
		if err := q.configure(attrs); err != nil {
			return nil, fmt.Errorf("packet queue: %w: the kernel needs CONFIG_NETFILTER_NETLINK_QUEUE", err)
		}
	}
	if q.wake, q.end, err = os.Pipe(); err != nil {
		return nil, err
	}
	go func() { q.done <- q.run() }()
	return q, nil
}

// close ends the queue; the kernel passes on what waits in it.
func (q *queue) close() error {
	q.end.Close()
	err := <-q.done
	q.wake.Close()
	return errors.Join(err, unix.Close(q.socket))
}

// run passes packets on in time, until close.
func (q *queue) run() error {
	// A thread that waits in the kernel needs no timer of Go's, which are exact to a millisecond only. A wire needs no
	// processor, so nothing may keep this thread from one.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	thread := unix.Gettid()
	priority, err := unix.Getpriority(unix.PRIO_PROCESS, thread)
	if err != nil {
		return err
	}
	priority = 20 - priority // the system call's own form
	if err := unix.Setpriority(unix.PRIO_PROCESS, thread, -15); err != nil {
		return fmt.Errorf("priority: %w", err)
	}
	defer func() { _ = unix.Setpriority(unix.PRIO_PROCESS, thread, priority) }()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("timer slack: %w", err)
	}
	defer func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) }() // 0 is the default

	fds := []unix.PollFd{{Fd: int32(q.socket), Events: unix.POLLIN}, {Fd: int32(q.wake.Fd()), Events: unix.POLLIN}}
	buf := make([]byte, 64<<10)
	for {
		var timeout *unix.Timespec
		if len(q.waiting) > 0 {
			t := unix.NsecToTimespec(max(0, time.Until(q.waiting[0].due).Nanoseconds()))
			timeout = &t
		}
		if _, err := unix.Ppoll(fds, timeout, nil); err != nil && err != unix.EINTR {
			return fmt.Errorf("poll: %w", err)
		}
		if fds[1].Revents != 0 {
			if len(q.waiting) > 0 {
				return q.accept(q.waiting[len(q.waiting)-1].id)
			}
			return nil
		}
		if err := q.receive(buf); err != nil {
			return err
		}
		if err := q.pass(); err != nil {
			return err
		}
	}
}

// receive takes the packets that came.
func (q *queue) receive(buf []byte) error {
	for {
		n, _, err := unix.Recvfrom(q.socket, buf, unix.MSG_DONTWAIT)
		switch err {
		case nil:
			q.enter(buf[:n], time.Now())
		case unix.EAGAIN:
			return nil
		case unix.EINTR:
		default:
			return fmt.Errorf("packet queue: %w", err)
		}
	}
}

// enter puts the packets of a datagram on the wire.
func (q *queue) enter(datagram []byte, now time.Time) {
	for len(datagram) >= netlinkHeader {
		size := int(binary.NativeEndian.Uint32(datagram))
		if size < netlinkHeader || size > len(datagram) {
			return
		}
		if binary.NativeEndian.Uint16(datagram[4:]) == msgPacket {
			p := packet{}
			length := uint32(copied)
			for kind, value := range attributes(datagram[netlinkHeader:size]) {
				switch {
				case kind == attrPacketHdr && len(value) >= 4:
					p.id = binary.BigEndian.Uint32(value)
				case kind == attrLength && len(value) >= 4:
					length = binary.BigEndian.Uint32(value)
				}
			}
			if q.free.Before(now) {
				q.free = now
			}
			q.free = q.free.Add(time.Duration(float64(length) / float64(q.shape.Rate) * float64(time.Second)))
			p.due = q.free.Add(q.shape.RoundTrip / 2)
			q.waiting = append(q.waiting, p)
		}
		datagram = datagram[min(align(size), len(datagram)):]
	}
}

// pass lets go what has arrived at the other end by now.
func (q *queue) pass() error {
	now := time.Now()
	n := 0
	for n < len(q.waiting) && !q.waiting[n].due.After(now) {
		n++
	}
	if n == 0 {
		return nil
	}
	last := q.waiting[n-1].id
	q.waiting = append(q.waiting[:0], q.waiting[n:]...)
	return q.accept(last)
}

// accept passes on all packets up to an ID.
func (q *queue) accept(id uint32) error {
	verdict := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, verdictAccept), id)
	err := unix.Sendto(q.socket, q.message(msgVerdictBatch, 0, attribute(nil, attrVerdictHdr, verdict)), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err != nil {
		return fmt.Errorf("packet queue: %w", err)
	}
	return nil
}

// configure sends a message of configuration and waits for its acknowledgement. No packets come yet: no rule names the queue.
func (q *queue) configure(attrs []byte) error {
	m := q.message(msgConfig, unix.NLM_F_ACK, attrs)
	if err := unix.Sendto(q.socket, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	n, _, err := unix.Recvfrom(q.socket, buf, 0)
	if err != nil {
		return err
	}
	if n < 20 || binary.NativeEndian.Uint16(buf[4:]) != unix.NLMSG_ERROR {
		return errors.New("no acknowledgement")
	}
	if code := int32(binary.NativeEndian.Uint32(buf[16:])); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}

func (q *queue) message(kind, flags uint16, attrs []byte) []byte {
	m := binary.NativeEndian.AppendUint32(nil, uint32(netlinkHeader+len(attrs)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|flags)
	m = append(m, make([]byte, 8)...) // sequence number and sender: not used
	m = append(m, unix.AF_UNSPEC, 0)
	m = binary.BigEndian.AppendUint16(m, q.number)
	return append(m, attrs...)
}

// attribute appends a netlink attribute.
func attribute(to []byte, kind uint16, value []byte) []byte {
	to = binary.NativeEndian.AppendUint16(to, uint16(min(4+len(value), math.MaxUint16)))
	to = binary.NativeEndian.AppendUint16(to, kind)
	to = append(to, value...)
	return append(to, make([]byte, align(len(value))-len(value))...)
}

// attributes goes through the netlink attributes in p, without the flags of their kinds.
func attributes(p []byte) func(yield func(uint16, []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(p) >= 4 {
			size := int(binary.NativeEndian.Uint16(p))
			if size < 4 || size > len(p) || !yield(binary.NativeEndian.Uint16(p[2:])&^uint16(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), p[4:size]) {
				return
			}
			p = p[min(align(size), len(p)):]
		}
	}
}

// align rounds up to netlink's alignment.
func align(n int) int { return (n + 3) &^ 3 }
