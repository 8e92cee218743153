// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"net"

	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
)

// sameUser is a unix socket's listener that takes connections of processes of this
// user alone, for servers that do not look at who connects themselves.
type sameUser struct {
	net.Listener
	ctx context.Context
}

func (l sameUser) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if _, _, err = ttrpc.UnixSocketRequireSameUser().Handshake(l.ctx, c); err == nil {
			return c, nil
		}
		c.Close()
		log.G(l.ctx).WithError(err).WithField("socket", l.Addr()).Warn("connection refused")
	}
}
