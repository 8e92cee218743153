// SPDX-License-Identifier: Apache-2.0

package pageserver

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// memory is a source of one process, pid 7, with pages from base on. Every page
// says where it is.
type memory struct {
	pages int
	// hold, if set, is waited for by Await for page 0.
	hold chan struct{}
	// begun, if set, gets the page of each Await; gaveUp those that ended early.
	begun, gaveUp chan int
}

const (
	testPID = 7
	base    = 0x7f0000000000
)

func (m *memory) Await(ctx context.Context, pid uint32, address uint64, count int) (int, error) {
	n := int(address-base) / PageSize
	if pid != testPID || address < base || n >= m.pages {
		return 0, fmt.Errorf("page %#x of process %d: %w", address, pid, errdefs.ErrNotFound)
	}
	if m.begun != nil {
		m.begun <- n
	}
	if m.hold != nil && n == 0 {
		select {
		case <-m.hold:
		case <-ctx.Done():
			m.gaveUp <- n
			return 0, ctx.Err()
		}
	}
	return min(count, m.pages-n), nil
}

func (m *memory) Read(_ uint32, address uint64, p []byte) error {
	for i := 0; i < len(p); i += PageSize {
		copy(p[i:], content(address+uint64(i)))
	}
	return nil
}

func content(address uint64) []byte {
	p := bytes.Repeat([]byte{byte(address >> 12)}, PageSize)
	binary.NativeEndian.PutUint64(p, address)
	return p
}

// start serves a source; the server has ended, with all its connections, when the
// test ends.
func start(t *testing.T, s *Server) *net.TCPAddr {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if len(s.clients) != 0 {
			t.Errorf("%d clients are left", len(s.clients))
		}
	})
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatal(l.Addr())
	}
	return addr
}

// criu plays CRIU's lazy-pages daemon.
type criu struct {
	t *testing.T
	*net.TCPConn
	form form
}

func dial(t *testing.T, addr *net.TCPAddr, f form) criu {
	t.Helper()
	c, err := net.DialTCP("tcp", nil, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return criu{t, c, f}
}

func (c criu) say(r request) {
	c.t.Helper()
	if _, err := c.Write(c.form.append(nil, r)); err != nil {
		c.t.Fatal(err)
	}
}

func (c criu) get(page, count int) {
	c.t.Helper()
	c.say(request{command: commandGet, pages: uint64(count), address: base + uint64(page)*PageSize, pid: testPID})
}

// take reads an answer and checks that it is for that request.
func (c criu) take(page, count int) {
	c.t.Helper()
	p := make([]byte, int(c.form)+count*PageSize)
	if _, err := io.ReadFull(c, p); err != nil {
		c.t.Fatal(err)
	}
	want := request{command: commandAdd | flagPresent, pages: uint64(count), address: base + uint64(page)*PageSize, pid: testPID}
	if !bytes.Equal(p[:c.form], c.form.append(nil, want)) {
		c.t.Fatalf("answer %x, want %+v", p[:c.form], want)
	}
	for i := range count {
		address := want.address + uint64(i)*PageSize
		if got := p[int(c.form)+i*PageSize:][:PageSize]; !bytes.Equal(got, content(address)) {
			c.t.Fatalf("page %#x is %x...", address, got[:16])
		}
	}
}

// ends checks that the server closes without another byte.
func (c criu) ends() {
	c.t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("%d bytes, %v", n, err)
	}
}

func (c criu) bye(command uint32) {
	c.t.Helper()
	c.say(request{command: command})
	var status [4]byte
	if _, err := io.ReadFull(c, status[:]); err != nil || status != [4]byte{} {
		c.t.Fatalf("status %x, %v", status, err)
	}
	if err := c.CloseWrite(); err != nil {
		c.t.Fatal(err)
	}
	c.ends()
}

func forms(t *testing.T, run func(t *testing.T, f form)) {
	for _, f := range []form{compact, wide} {
		t.Run(fmt.Sprint(int(f)), func(t *testing.T) { run(t, f) })
	}
}

func TestSession(t *testing.T) {
	forms(t, func(t *testing.T, f form) {
		c := dial(t, start(t, New(&memory{pages: 3000})), f)
		c.get(5, 1)
		c.take(5, 1)
		c.get(16, 16)
		c.take(16, 16)
		c.get(0, MaxPages)
		c.take(0, MaxPages)
		// More than an answer holds, and more than there is.
		c.get(0, 2*MaxPages)
		c.take(0, MaxPages)
		c.get(2999, 10)
		c.take(2999, 1)
		c.bye(commandClose)
	})
}

func TestNothingToAsk(t *testing.T) {
	forms(t, func(t *testing.T, f form) {
		dial(t, start(t, New(&memory{})), f).bye(commandForceClose)
	})
}

// A client goes on asking while it waits, and gets its answers in order.
func TestPipelined(t *testing.T) {
	forms(t, func(t *testing.T, f form) {
		m := &memory{pages: 1000, hold: make(chan struct{}), begun: make(chan int, 51), gaveUp: make(chan int, 51)}
		c := dial(t, start(t, New(m)), f)
		c.get(0, 64)
		for i := 100; i < 150; i++ {
			c.get(i, 1)
		}
		// All of them are worked on although the first is not there.
		for range 51 {
			<-m.begun
		}
		close(m.hold)
		c.take(0, 64)
		for i := 100; i < 150; i++ {
			c.take(i, 1)
		}
		c.bye(commandClose)
	})
}

// Bytes that come one by one are a request too.
func TestTrickle(t *testing.T) {
	forms(t, func(t *testing.T, f form) {
		c := dial(t, start(t, New(&memory{pages: 10})), f)
		for _, b := range f.append(nil, request{command: commandGet, pages: 1, address: base, pid: testPID}) {
			if _, err := c.Write([]byte{b}); err != nil {
				t.Fatal(err)
			}
		}
		c.take(0, 1)
	})
}

func TestRefused(t *testing.T) {
	good := request{command: commandGet, pages: 1, address: base, pid: testPID}
	for name, spoil := range map[string]func(*request){
		"write":          func(r *request) { r.command = commandAdd },
		"open":           func(r *request) { r.command = 4 },
		"unknown":        func(r *request) { r.command = 99 },
		"no process":     func(r *request) { r.pid = 0 },
		"other process":  func(r *request) { r.pid = 8 },
		"huge process":   func(r *request) { r.pid = 1 << 40 },
		"no pages":       func(r *request) { r.pages = 0 },
		"unaligned":      func(r *request) { r.address++ },
		"kernel address": func(r *request) { r.address = 0xffff800000000000 },
		"no such page":   func(r *request) { r.address = base + 1<<30 },
	} {
		t.Run(name, func(t *testing.T) {
			forms(t, func(t *testing.T, f form) {
				addr := start(t, New(&memory{pages: 10}))
				other := dial(t, addr, f)
				other.get(1, 1)
				other.take(1, 1)
				c := dial(t, addr, f)
				c.get(2, 1)
				c.take(2, 1)
				r := good
				spoil(&r)
				c.say(r)
				c.ends()
				// The others do not notice.
				other.get(3, 1)
				other.take(3, 1)
			})
		})
	}
}

// Whoever never asks makes room for new clients; whoever has, stays.
func TestTooManyClients(t *testing.T) {
	s := New(&memory{pages: 10})
	addr := start(t, s)
	first := dial(t, addr, wide)
	first.get(0, 1)
	first.take(0, 1)
	for range 2 * maxConnections {
		dial(t, addr, wide)
	}
	late := dial(t, addr, compact)
	late.get(1, 1)
	late.take(1, 1)
	first.get(2, 1)
	first.take(2, 1)

	var busy []criu
	for range maxConnections - 2 {
		c := dial(t, addr, wide)
		c.get(3, 1)
		c.take(3, 1)
		busy = append(busy, c)
	}
	// The last idle ones are gone, and nobody else is sent away.
	dial(t, addr, wide).ends()
	for _, c := range append(busy, first) {
		c.get(4, 1)
		c.take(4, 1)
	}
}

// What is done for a client ends with it.
func TestDeadClient(t *testing.T) {
	m := &memory{pages: 10, hold: make(chan struct{}), begun: make(chan int, 1), gaveUp: make(chan int, 1)}
	c := dial(t, start(t, New(m)), wide)
	c.get(0, 1)
	<-m.begun
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	<-m.gaveUp
}

// A client that asks and asks and takes nothing gets no more than its window, and
// the others get theirs.
func TestFlood(t *testing.T) {
	const requests = 2000
	m := &memory{pages: 4 * MaxPages, begun: make(chan int, requests+1)}
	addr := start(t, New(m))
	flood := dial(t, addr, wide)
	for i := range requests {
		flood.get(1+i%100, MaxPages)
	}
	ok := dial(t, addr, wide)
	ok.get(9, 1)
	ok.take(9, 1)
	// Some were answered into the sockets' buffers.
	if n := len(m.begun); n > 100 {
		t.Errorf("%d requests were begun for a client that takes nothing", n)
	}
}

func TestSourceFails(t *testing.T) {
	c := dial(t, start(t, New(broken{})), wide)
	c.get(0, 1)
	c.ends()
}

type broken struct{}

func (broken) Await(context.Context, uint32, uint64, int) (int, error) { return 1, nil }
func (broken) Read(uint32, uint64, []byte) error                       { return errors.New("disk") }

func TestForeignUser(t *testing.T) {
	s := New(&memory{pages: 1})
	s.allow = func(c *net.TCPConn) error {
		if err := sameUser(c); err != nil {
			return err
		}
		return errdefs.ErrPermissionDenied
	}
	dial(t, start(t, s), wide).ends()
}

const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 0100007F:A3C2 01 00000000:00000000 00:00000000 00000000     0        0 901 1 0000000000000000 20 4 30 10 -1
   1: 0100007F:A3C2 0100007F:1F90 04 00000000:00000000 00:00000000 00000000     0        0 0 1 0000000000000000 20 4 30 10 -1
   2: 0100007F:A3C2 0100007F:1F91 01 00000000:00000000 00:00000000 00000000  1000        0 902 1 0000000000000000 20 4 30 10 -1
   3: 0000000000000000FFFF00000100007F:A3C3 0000000000000000FFFF00000100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001 0 903 1 0
   4: zz:1 yy:2 01
   5: 00000000000000000000000001000000:A3C2 00000000000000000000000001000000:1F90 01 00000000:00000000 00:00000000 00000000  1002 0 904 1 0
`

func TestOwnerOf(t *testing.T) {
	for _, c := range []struct {
		local, remote string
		uid           int // -1: unknown
	}{
		{"127.0.0.1:41922", "127.0.0.1:8080", -1}, // closed by its owner
		{"127.0.0.1:41922", "127.0.0.1:8081", 1000},
		{"127.0.0.1:41923", "127.0.0.1:8080", 1001},
		{"[::1]:41922", "[::1]:8080", 1002},
		{"127.0.0.1:8080", "127.0.0.1:41922", 0},
		{"127.0.0.2:8080", "127.0.0.1:41922", -1},
	} {
		uid, err := ownerOf(strings.NewReader(table), netip.MustParseAddrPort(c.local), netip.MustParseAddrPort(c.remote))
		if c.uid < 0 && !errdefs.IsNotFound(err) || c.uid >= 0 && (err != nil || uid != uint32(c.uid)) {
			t.Errorf("%s to %s: %d, %v, want %d", c.local, c.remote, uid, err, c.uid)
		}
	}
}

func FuzzRequest(f *testing.F) {
	for _, form := range []form{compact, wide} {
		for _, r := range []request{
			{command: commandGet, pages: 1, address: base, pid: testPID},
			{command: commandGet, pages: MaxPages, address: 0x10000, pid: 1},
			{command: commandClose},
		} {
			f.Add(form.append(nil, r))
		}
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < int(compact) {
			return
		}
		form := formOf(p)
		if len(p) < int(form) {
			return
		}
		r, err := form.parse(p)
		if err != nil {
			if !errors.Is(err, ErrProtocol) || strings.Contains(err.Error(), "\n") {
				t.Error(err)
			}
			return
		}
		if r.command == commandGet && (r.weight() < 1 || r.weight() > MaxPages) {
			t.Errorf("%+v", r)
		}
		again, err := form.parse(form.append(nil, r))
		if err != nil || again != r {
			t.Errorf("%+v became %+v, %v", r, again, err)
		}
		if r.command == commandGet && r.address >= PageSize && r.pages < PageSize && formOf(form.append(nil, r)) != form {
			t.Errorf("%+v: form %d is not recognised", r, form)
		}
	})
}
