// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
)

// Names is a name server that knows one name, at 127.0.0.1, and may forget it.
type Names struct {
	name    string
	conn    net.PacketConn
	serving sync.WaitGroup
	gone    atomic.Bool
}

// StartNames serves a name on a free port. Close ends it.
func StartNames(name string) (*Names, error) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("faultproxy: %w", err)
	}
	n := &Names{name: name, conn: conn}
	n.serving.Go(n.serve)
	return n, nil
}

// Forget makes the name unknown, or known again.
func (n *Names) Forget(yes bool) { n.gone.Store(yes) }

// Resolver asks this server and no other.
func (n *Names) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", n.conn.LocalAddr().String())
	}}
}

// Close ends the server.
func (n *Names) Close() error {
	err := n.conn.Close()
	n.serving.Wait()
	return err
}

func (n *Names) serve() {
	query := make([]byte, 512)
	for {
		size, from, err := n.conn.ReadFrom(query)
		if err != nil {
			return
		}
		if answer := n.answer(query[:size]); answer != nil {
			_, _ = n.conn.WriteTo(answer, from) // who gets none asks again
		}
	}
}

// Parts of a message of RFC 1035.
const (
	headerSize = 12
	typeA      = 1
)

// answer answers the first question of a query.
func (n *Names) answer(query []byte) []byte {
	var labels []string
	at := headerSize
	for at < len(query) && query[at] != 0 {
		end := at + 1 + int(query[at])
		if end > len(query) {
			return nil
		}
		labels = append(labels, string(query[at+1:end]))
		at = end
	}
	end := at + 1 + 4 // type and class
	if end > len(query) {
		return nil
	}
	known := strings.EqualFold(strings.Join(labels, "."), n.name) && !n.gone.Load()
	out := append([]byte(nil), query[:end]...)
	copy(out[2:headerSize], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}) // an answer with one question and no records
	switch {
	case !known:
		out[3] |= 3 // NXDOMAIN
	case query[at+1] == 0 && query[at+2] == typeA:
		out[7] = 1
		out = append(out, 0xc0, headerSize, 0, typeA, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 1)
	}
	return out
}
