// SPDX-License-Identifier: Apache-2.0

// Package keeper keeps a second holder of every userfaultfd.
//
// When the last descriptor of a userfaultfd closes, the kernel hands out zero
// pages where pages are missing, and the process runs on with wrong memory. So a
// shim gives duplicates of its descriptors to the node daemon, which holds them.
// When the shim says that no page is missing any more, or that the processes are
// gone, the daemon closes them. When the shim's connection breaks without that,
// the shim has died: the daemon kills the container's processes, waits until
// they are dead, and only then closes the descriptors.
//
// The protocol runs over a unix socket of the type SOCK_SEQPACKET, one connection
// for each container. Each message of the client is a packet with a JSON object
// (Message), with descriptors attached as SCM_RIGHTS; the daemon answers each
// with a packet holding a JSON object (reply) once it has done what was asked.
// A client that loses the daemon connects again and sends everything anew.
//
// The package is used by the shim and imports little.
package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// MaxFDs is the most descriptors that one Hold may carry (Linux, SCM_MAX_FD).
	MaxFDs = 253
	// maxMessage bounds a packet in bytes.
	maxMessage = 64 << 10
	// replyTimeout bounds how long the daemon may take to answer.
	replyTimeout = 10 * time.Second
)

// Container says which processes die when their page handler does.
type Container struct {
	// RestoreID is the restore, for logs.
	RestoreID string `json:"restore_id"`
	// Cgroups are the container's cgroups as paths below /sys/fs/cgroup: one on
	// cgroup v2, one for each hierarchy that lists processes on v1.
	Cgroups []string `json:"cgroups,omitempty"`
	// InitPID is the container's first process, whose death ends its PID
	// namespace; 0 while it is not known.
	InitPID int `json:"init_pid,omitempty"`
}

// message is what a client sends.
type message struct {
	Container
	// Done says that the descriptors may be closed and nobody be killed.
	Done bool `json:"done,omitempty"`
}

// reply is the answer to a message.
type reply struct {
	Error string `json:"error,omitempty"`
}

// Conn is a client's connection for one container. Its methods may be called at
// the same time.
type Conn struct {
	mu   sync.Mutex
	conn *net.UnixConn
	lost chan struct{}
	once sync.Once
}

// Dial connects to the daemon.
func Dial(path string) (*Conn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		return nil, fmt.Errorf("thaw-snapshotter's keeper (is thaw-snapshotter running?): %w", err)
	}
	conn := &Conn{conn: c, lost: make(chan struct{})}
	return conn, nil
}

// Hold gives the daemon duplicates of descriptors and says, or says anew, which
// processes depend on them; fds may be empty. The caller keeps its own. When
// Hold returns without error, the daemon has them.
func (c *Conn) Hold(container Container, fds []int) error {
	if len(fds) > MaxFDs {
		return fmt.Errorf("%d descriptors at once, at most %d are possible", len(fds), MaxFDs)
	}
	return c.send(message{Container: container}, fds)
}

// Done tells the daemon that no page is missing any more, or that no process is
// left, and closes the connection.
func (c *Conn) Done() error {
	err := c.send(message{Done: true}, nil)
	return errors.Join(err, c.Close())
}

// Lost is closed when a call has found the connection broken: the daemon has no
// descriptor any more.
func (c *Conn) Lost() <-chan struct{} { return c.lost }

// Close closes the connection. Without Done before it, the daemon kills the
// container.
func (c *Conn) Close() error {
	c.once.Do(func() { close(c.lost) })
	return c.conn.Close()
}

func (c *Conn) send(m message, fds []int) error {
	p, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(p) > maxMessage {
		return fmt.Errorf("message of %d bytes to the keeper, allowed are %d", len(p), maxMessage)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	answer, err := c.exchange(p, rights)
	if err != nil {
		c.once.Do(func() { close(c.lost) })
		return fmt.Errorf("thaw-snapshotter's keeper: %w", err)
	}
	if answer.Error != "" {
		return fmt.Errorf("thaw-snapshotter's keeper: %s", answer.Error)
	}
	return nil
}

func (c *Conn) exchange(p, rights []byte) (r reply, err error) {
	if err := c.conn.SetDeadline(time.Now().Add(replyTimeout)); err != nil {
		return r, err
	}
	if _, _, err := c.conn.WriteMsgUnix(p, rights, nil); err != nil {
		return r, err
	}
	buf := make([]byte, maxMessage)
	n, err := c.conn.Read(buf)
	if err != nil {
		return r, err
	}
	if n == 0 {
		return r, os.ErrClosed
	}
	return r, json.Unmarshal(buf[:n], &r)
}
