// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"net"

	"github.com/containerd/ttrpc"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/test/stack"
)

// askNode makes a call to thaw's daemon.
func askNode(ctx context.Context, call func(api.NodeService) error) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", stack.ThawSocket)
	if err != nil {
		return err
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	return call(api.NewNodeClient(client))
}

// restoreStatus is what the daemon knows of a restored container.
func restoreStatus(ctx context.Context, id string) (*api.Status, error) {
	var list *api.ListResponse
	err := askNode(ctx, func(n api.NodeService) (err error) {
		list, err = n.List(ctx, &api.ListRequest{})
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, r := range list.Restores {
		if r.ContainerId == id {
			return r, nil
		}
	}
	return nil, errors.New("the daemon does not know the container: it was not restored")
}
