// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/spans"
)

const (
	// defaultNodeAddress is where the daemon listens unless its config says otherwise.
	defaultNodeAddress = "/run/thaw/thaw.sock"
	// nodeAddressEnv overrides it, in containerd's environment.
	nodeAddressEnv = "THAW_ADDRESS"

	// dialTimeout bounds one attempt to connect. The socket is local: either
	// somebody listens or nobody does.
	dialTimeout = 5 * time.Second
)

func nodeAddress() string {
	if a := os.Getenv(nodeAddressEnv); a != "" {
		return a
	}
	return defaultNodeAddress
}

// keeperAddress is the daemon's other socket, which lies beside the first.
func keeperAddress(node string) string { return filepath.Join(filepath.Dir(node), "keeper.sock") }

// restoreID names a restore. A container is restored at most once, so its own
// name will do, and whoever cleans up after a shim can know it.
func restoreID(namespace, container string) string { return namespace + "/" + container }

// node is the connection to the daemon. It is made when it is first needed and
// again after it broke.
type node struct {
	address string

	mu     sync.Mutex
	client *ttrpc.Client // nil when there is no connection
}

func newNode(address string) *node { return &node{address: address} }

// awayError says that nobody answered, unlike errors that the daemon answered
// with. It is of the class ErrUnavailable.
type awayError struct{ error }

func (e awayError) Unwrap() []error { return []error{e.error, errdefs.ErrUnavailable} }

// call runs fn with a connected client. A connection that had gone stale since
// the last call is replaced once. If nobody answers, the error is an awayError.
func (n *node) call(ctx context.Context, fn func(context.Context, api.NodeService) error) error {
	return n.with(ctx, func(ctx context.Context, c *ttrpc.Client) error { return fn(ctx, api.NewNodeClient(c)) })
}

func (n *node) with(ctx context.Context, fn func(context.Context, *ttrpc.Client) error) error {
	for attempt := 0; ; attempt++ {
		c, fresh, err := n.connect(ctx)
		if err != nil {
			return err
		}
		err = fn(ctx, c)
		if !errors.Is(err, ttrpc.ErrClosed) {
			return api.FromStatus(err)
		}
		n.drop(c)
		if fresh || attempt > 0 {
			return awayError{fmt.Errorf("the connection to thaw-snapshotter at %s broke", n.address)}
		}
	}
}

func (n *node) connect(ctx context.Context) (c *ttrpc.Client, fresh bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client != nil {
		return n.client, false, nil
	}
	d := net.Dialer{Timeout: dialTimeout}
	conn, err := d.DialContext(ctx, "unix", n.address)
	if err != nil {
		return nil, false, awayError{fmt.Errorf("thaw-snapshotter is not running on this node (%w): start it, e.g. systemctl start thaw-snapshotter", err)}
	}
	var opts []ttrpc.ClientOpts
	if spans.Configured() {
		opts = append(opts, ttrpc.WithUnaryClientInterceptor(spans.ClientInterceptor()))
	}
	n.client = ttrpc.NewClient(conn, opts...)
	return n.client, true, nil
}

func (n *node) drop(c *ttrpc.Client) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client == c {
		n.client = nil
	}
	c.Close()
}

func (n *node) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client != nil {
		n.client.Close()
		n.client = nil
	}
}
