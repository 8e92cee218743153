// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/urfave/cli/v2"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

var inspectCommand = &cli.Command{
	Name:      "inspect",
	Usage:     "show what a checkpoint image holds",
	ArgsUsage: "REF",
	Description: `Only manifests, config and page index are fetched, never memory. For whom a checkpoint
is encrypted is what its image says; no key is needed.

Examples:
  thaw inspect registry.example/agents/warm:1
  thaw inspect --json registry.example/agents/warm:1 | jq .config.processes`,
	Flags:        []cli.Flag{jsonFlag, hostsDirFlag, configFlag},
	OnUsageError: onUsageError,
	Action:       runInspect,
}

// inspection is the JSON of thaw inspect.
type inspection struct {
	Reference  string             `json:"reference"`
	Checkpoint digest.Digest      `json:"checkpoint"`             // of the checkpoint manifest
	Encrypted  []string           `json:"encryptedFor,omitempty"` // as the image says
	Config     *checkpoint.Config `json:"config"`
	Sizes      inspectionSizes    `json:"sizes"`
	Blobs      []inspectionBlob   `json:"pageBlobs"`
}

// inspectionSizes are in bytes, as in the registry.
type inspectionSizes struct {
	State     int64 `json:"state"`
	PageIndex int64 `json:"pageIndex"`
	Pages     int64 `json:"pages"`
}

type inspectionBlob struct {
	Digest digest.Digest `json:"digest"`
	Size   int64         `json:"size"`
	// Not known if the checkpoint is encrypted:
	Chunks int    `json:"chunks,omitempty"`
	Pages  uint64 `json:"pages,omitempty"`
	Used   int    `json:"usedChunks,omitempty"` // that this checkpoint refers to
}

func runInspect(c *cli.Context) error {
	args, err := arguments(c, "REF")
	if err != nil {
		return err
	}
	cfg, err := nodeConfig(c)
	if err != nil {
		return err
	}
	if err := useDockerConfig(cfg); err != nil {
		return err
	}
	x, err := inspect(c.Context, args[0], certsDir(c, cfg))
	if err != nil {
		return fmt.Errorf("inspect: %w", err)
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, x)
	}
	return x.print(c.App.Writer)
}

func inspect(ctx context.Context, ref, certs string) (*inspection, error) {
	img, err := publish.Read(ctx, ref, certs)
	if err != nil {
		return nil, err
	}
	config, err := img.Config(ctx)
	if err != nil {
		return nil, err
	}
	x := &inspection{
		Reference: img.Reference, Checkpoint: img.Checkpoint.Manifest.Digest, Config: config,
		Sizes: inspectionSizes{State: img.Checkpoint.State.Size, PageIndex: img.Checkpoint.PageIndex.Size},
		Blobs: []inspectionBlob{},
	}
	if keys := img.Checkpoint.Keys; keys != nil {
		x.Encrypted = wrap.Describe(keys)
		for _, p := range img.Checkpoint.Pages {
			x.Sizes.Pages += p.Size
			x.Blobs = append(x.Blobs, inspectionBlob{Digest: p.Digest, Size: p.Size})
		}
		return x, nil
	}
	index, err := img.PageIndex(ctx)
	if err != nil {
		return nil, err
	}
	for i := range index.Blobs {
		b := &index.Blobs[i]
		x.Sizes.Pages += b.Size()
		x.Blobs = append(x.Blobs, inspectionBlob{Digest: b.Digest, Size: b.Size(), Chunks: len(b.Chunks), Pages: b.Pages(), Used: usedChunks(index, i)})
	}
	return x, nil
}

// usedChunks counts the chunks of a blob that any process has pages in.
func usedChunks(x *pageindex.Index, blob int) int {
	b := &x.Blobs[blob]
	used := make([]bool, len(b.Chunks))
	for _, p := range x.Processes {
		for _, r := range p.Runs {
			if r.Blob != blob {
				continue
			}
			for i := b.ChunkOf(r.Page); i < len(used) && b.FirstPage(i) < r.Page+r.Pages; i++ {
				used[i] = true
			}
		}
	}
	n := 0
	for _, u := range used {
		if u {
			n++
		}
	}
	return n
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func (x *inspection) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	c := x.Config
	row := func(key, format string, args ...any) { fmt.Fprintf(w, "%s:\t%s\n", key, fmt.Sprintf(format, args...)) }
	row("Image", "%s", x.Reference)
	row("Checkpoint", "%s", x.Checkpoint)
	row("Container", "%s", plain(c.Container.Name))
	row("Base image", "%s", plain(c.Container.BaseImage))
	row("Created", "%s", c.Created.Local().Format(time.RFC3339))
	row("Host", "Linux %s, %s, CRIU %s, %s", plain(c.Host.Kernel), plain(c.Host.Architecture), plain(c.Host.CRIU), plain(c.Host.Runtime))
	for _, r := range x.Encrypted {
		row("Encrypted for", "%s", plain(r))
	}
	m := c.Memory
	row("Memory", "%s: lazy %s (zero %s), eager %s", size(m.Total), size(m.Lazy), size(m.Zero), size(m.Eager))
	row("In registry", "state %s, page index %s, pages %s", size(x.Sizes.State), size(x.Sizes.PageIndex), size(x.Sizes.Pages))
	for i, b := range x.Blobs {
		if x.Encrypted != nil {
			row(fmt.Sprintf("Page blob %d", i), "%s, %s", b.Digest, size(b.Size))
			continue
		}
		row(fmt.Sprintf("Page blob %d", i), "%s, %s in %d chunks, %d of them used", b.Digest, size(b.Size), b.Chunks, b.Used)
	}
	if c.Container.GPU {
		row("GPU", "yes")
	}
	for _, mt := range c.Mounts {
		mode := "rw"
		if mt.ReadOnly {
			mode = "ro"
		}
		row("Mount", "%s (%s, %s)", plain(mt.Destination), plain(mt.Type), mode)
	}
	for _, s := range c.Sockets {
		peer := ""
		if s.Remote != "" {
			peer = " to " + plain(s.Remote)
		}
		row("Socket", "%s %s %s%s", plain(s.Protocol), plain(s.State), plain(s.Local), peer)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	fmt.Fprintln(w, "PID\tPPID\tNAME\tTHREADS\tUID:GID\tSECCOMP\tNNP\tCAPABILITIES")
	for _, p := range c.Processes {
		fmt.Fprintf(w, "%d\t%d\t%s\t%d\t%d:%d\t%s\t%v\t%s\n", p.PID, p.PPID, plain(p.Name), p.Threads, p.UID, p.GID, plain(p.Seccomp), p.NoNewPrivs, caps(p.Caps))
	}
	return w.Flush()
}

func caps(c []string) string {
	switch {
	case len(c) == 0:
		return "none"
	case len(c) > 6:
		return fmt.Sprintf("%d", len(c))
	}
	short := make([]string, len(c))
	for i := range c {
		short[i] = plain(strings.ToLower(strings.TrimPrefix(c[i], "CAP_")))
	}
	return strings.Join(short, ",")
}

// plain is text from an image without what could confuse a terminal, for a table.
func plain(s string) string {
	if s = api.Line(s); s == "" {
		return "-"
	}
	return s
}
