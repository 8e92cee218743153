// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sort"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/encoding/protojson"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
)

var psCommand = &cli.Command{
	Name:  "ps",
	Usage: "list the restored containers on this node",
	Description: `PRESENT are the pages that are in the processes' memory or were given up by them.
WAIT is how long half, and 99 of 100, of the page faults waited.

Examples:
  thaw ps
  thaw ps --json | jq '.restores[] | select(.state == "failed")'`,
	Flags:        []cli.Flag{jsonFlag, &cli.BoolFlag{Name: "no-trunc", Usage: "print whole IDs"}, socketFlag, configFlag},
	OnUsageError: onUsageError,
	Action:       runPs,
}

// daemonTimeout bounds what is asked of the node's daemon.
const daemonTimeout = 10 * time.Second

func daemonSocket(c *cli.Context, cfg *config.Config) string {
	if s := c.String(socketFlag.Name); s != "" {
		return s
	}
	return filepath.Join(cfg.StateDir, "thaw.sock")
}

// dialDaemon connects to the node's daemon.
func dialDaemon(ctx context.Context, socket string) (*ttrpc.Client, error) {
	d := net.Dialer{Timeout: daemonTimeout}
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("thaw-snapshotter is not running on this node (%w): start it, e.g. systemctl start thaw-snapshotter", err)
	}
	return ttrpc.NewClient(conn), nil
}

// ask makes one call to the node's daemon.
func ask(ctx context.Context, socket string, call func(context.Context, api.NodeService) error) error {
	ctx, cancel := context.WithTimeout(ctx, daemonTimeout)
	defer cancel()
	client, err := dialDaemon(ctx, socket)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := call(ctx, api.NewNodeClient(client)); err != nil {
		return fmt.Errorf("thaw-snapshotter at %s: %w", socket, errgrpc.ToNative(err))
	}
	return nil
}

// list asks the node's daemon for its restores.
func list(ctx context.Context, socket string) (resp *api.ListResponse, err error) {
	err = ask(ctx, socket, func(ctx context.Context, n api.NodeService) (err error) {
		resp, err = n.List(ctx, &api.ListRequest{})
		return err
	})
	return resp, err
}

func runPs(c *cli.Context) error {
	if _, err := arguments(c); err != nil {
		return err
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	resp, err := list(c.Context, daemonSocket(c, cfg))
	if err != nil {
		return err
	}
	sort.SliceStable(resp.Restores, func(i, j int) bool { return resp.Restores[i].StartedUnixNs > resp.Restores[j].StartedUnixNs })
	if c.Bool("json") {
		p, err := protojson.MarshalOptions{Multiline: true, EmitUnpopulated: true}.Marshal(resp)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(c.App.Writer, "%s\n", p)
		return err
	}
	return printRestores(c.App.Writer, resp.Restores, time.Now(), c.Bool("no-trunc"))
}

func printRestores(out io.Writer, restores []*api.Status, now time.Time, whole bool) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CONTAINER\tPOD\tIMAGE\tAGE\tSTATE\tPAGES\tPRESENT\tFAULTS\tREMOTE\tWAIT P50\tWAIT P99\tFETCHED")
	for _, s := range restores {
		id := s.ContainerId
		if !whole && len(id) > 13 {
			id = id[:13]
		}
		state := plain(s.State)
		if s.Reason != "" {
			state += ": " + plain(s.Reason)
		}
		present := "-"
		if s.PagesTotal > 0 {
			present = fmt.Sprintf("%d%%", 100*s.PagesPresent/s.PagesTotal)
		}
		age := "-"
		if s.StartedUnixNs > 0 {
			age = now.Sub(time.Unix(0, s.StartedUnixNs)).Round(time.Second).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%d\t%d\t%s\t%s\t%s\n", plain(id), plain(s.Pod), plain(s.Image), age, state,
			s.PagesTotal, present, s.Faults, s.RemoteFaults, wait(s.FaultWaitP50Ns), wait(s.FaultWaitP99Ns), size(int64(s.BytesFetched)))
	}
	return w.Flush()
}

// wait is a duration in three digits.
func wait(ns uint64) string {
	d := time.Duration(ns)
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return fmt.Sprintf("%dus", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%.1fms", float64(d)/float64(time.Millisecond))
	}
	return d.Round(10 * time.Millisecond).String()
}
