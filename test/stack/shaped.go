// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"fmt"

	"thaw.dev/thaw/test/stack/link"
)

// ShapedAddress is where the registry is reached over the link of ServeShaped.
const ShapedAddress = "127.0.0.1:5002"

// ServeShaped lets the node reach the registry by ShapedAddress too, over a link of a shape, until the stack is closed. It may be
// called once.
func (s *Stack) ServeShaped(ctx context.Context, shape link.Shape) error {
	l, err := link.Listen(ctx, ShapedAddress, shape)
	if err != nil {
		return err
	}
	s.Registry.Serve(l)
	return writeFile("/etc/containerd/certs.d/"+ShapedAddress+"/hosts.toml", fmt.Sprintf(hosts, ShapedAddress))
}
