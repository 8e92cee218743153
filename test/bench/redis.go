// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// redisConn speaks as much of Redis' protocol as a benchmark needs.
type redisConn struct {
	net.Conn
	r *bufio.Reader
	w *bufio.Writer
}

// dialRedis connects until a server answers PING, as [stack.FirstReply] does for HTTP.
func dialRedis(ctx context.Context, ip string) (*redisConn, error) {
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for {
		c, err := pingRedis(ctx, ip)
		if err == nil {
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("no reply: %w", err)
		case <-pace.C:
		}
	}
}

func pingRedis(ctx context.Context, ip string) (*redisConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(ip, "6379"))
	if err != nil {
		return nil, err
	}
	c := &redisConn{conn, bufio.NewReader(conn), bufio.NewWriterSize(conn, 1<<20)}
	deadline, _ := ctx.Deadline()
	if err = conn.SetDeadline(deadline); err == nil {
		var answer []byte
		if answer, err = c.ask([]byte("PING")); err == nil && string(answer) != "PONG" {
			err = fmt.Errorf("redis: %q", answer)
		}
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return c, nil
}

func (c *redisConn) close() { c.Close() }

func (c *redisConn) send(words ...[]byte) {
	// A bufio.Writer keeps its first error for Flush.
	fmt.Fprintf(c.w, "*%d\r\n", len(words))
	for _, w := range words {
		fmt.Fprintf(c.w, "$%d\r\n%s\r\n", len(w), w)
	}
}

func (c *redisConn) ask(words ...[]byte) ([]byte, error) {
	c.send(words...)
	if err := c.w.Flush(); err != nil {
		return nil, err
	}
	return c.receive()
}

// receive reads a simple string or a bulk string of at most 1 MiB.
func (c *redisConn) receive() ([]byte, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	kind, rest := line[0], strings.TrimSpace(line[1:])
	switch kind {
	case '+':
		return []byte(rest), nil
	case '$':
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 || n > 1<<20 {
			return nil, wrongf("reply of redis: %q", line)
		}
		b := make([]byte, n+2)
		_, err = io.ReadFull(c.r, b)
		return b[:n], err
	}
	return nil, fmt.Errorf("redis: %s", strings.TrimSpace(line))
}

func (c *redisConn) get(key int) ([]byte, error) { return c.ask([]byte("GET"), redisKey(key)) }

func redisKey(i int) []byte { return strconv.AppendInt([]byte("key:"), int64(i), 10) }

// load sets keys 0 to n-1, many at a time.
func (c *redisConn) load(n int, value func(int) []byte) error {
	const batch = 1000
	for first := 0; first < n; first += batch {
		last := min(first+batch, n)
		for i := first; i < last; i++ {
			c.send([]byte("SET"), redisKey(i), value(i))
		}
		if err := c.w.Flush(); err != nil {
			return err
		}
		for range last - first {
			if _, err := c.receive(); err != nil {
				return err
			}
		}
	}
	return nil
}
