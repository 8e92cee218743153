// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"time"

	"github.com/containerd/log"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/snapshotter/api"
)

// reportInterval is how often a restore that makes progress tells the daemon.
const reportInterval = time.Second

// report tells the daemon how the restore is doing, as long as that changes.
func (c *restored) report(ctx context.Context) {
	tick := time.NewTicker(reportInterval)
	defer tick.Stop()
	var last *api.Status
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		status := c.status()
		if status.State != "restoring" {
			c.collect() // the first faults, which somebody waits for, are over
			c.traceCRIU()
		}
		if status.State == "complete" {
			c.guard.Stop() // no page is missing any more
		}
		c.record(ctx, status.State, false)
		if last != nil && proto.Equal(last, status) {
			continue
		}
		err := c.service.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
			_, err := n.Report(ctx, &api.ReportRequest{Status: status})
			return err
		})
		if err != nil {
			log.G(ctx).WithError(err).Debug("thaw: report")
			continue
		}
		last = status
	}
}

func (c *restored) status() *api.Status {
	st := c.pager.Stats()
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &api.Status{
		RestoreId: c.prepared.RestoreId, Namespace: c.namespace, ContainerId: c.id,
		Image: c.prepared.Image, Pod: c.pod, State: st.State,
		PagesTotal: st.PagesTotal, PagesPresent: st.PagesPresent,
		Faults: st.Faults, RemoteFaults: st.RemoteFaults,
		FaultWaitP50Ns: uint64(st.FaultWaitP50), FaultWaitP99Ns: uint64(st.FaultWaitP99),
		StartedUnixNs: c.started.UnixNano(),
	}
	if c.failure != nil {
		s.State, s.Reason = "failed", c.failure.Error()
	}
	return s
}
