// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"sort"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/checkpoint"
)

// describe makes the checkpoint's config from the images.
func describe(src *Source, maps []*image.Pagemap) (*checkpoint.Config, error) {
	c := &checkpoint.Config{
		Version:   fmt.Sprintf("%d.%d", checkpoint.Major, minor),
		Created:   src.Created.UTC(),
		Host:      src.Host,
		Container: src.Container,
	}
	c.Host.PageSize = image.PageSize
	if src.Base != nil {
		c.Container.BaseImage, c.Container.BaseID = src.Base.Reference, src.Base.Digest
	}
	tasks, err := src.Images.Tasks()
	if err != nil {
		return nil, err
	}
	for _, t := range tasks {
		c.Processes = append(c.Processes, process(t))
	}
	sort.Slice(c.Processes, func(i, j int) bool { return c.Processes[i].PID < c.Processes[j].PID })
	for _, m := range maps {
		c.Memory.Lazy += m.LazySize()
		c.Memory.Eager += m.EagerSize()
	}
	c.Memory.Total = c.Memory.Lazy + c.Memory.Eager
	if c.Mounts, err = mounts(src); err != nil {
		return nil, err
	}
	if c.Sockets, err = sockets(src.Images); err != nil {
		return nil, err
	}
	return c, nil
}

// minor is the minor version of the configs that are written: readers ignore it.
const minor = 0

func process(t image.Task) checkpoint.Process {
	p := checkpoint.Process{PID: t.PID, PPID: t.PPID, Name: api.Line(t.Comm), Threads: len(t.Threads), Seccomp: image.SeccompDisabled.String()}
	if len(t.Threads) > 0 {
		first := t.Threads[0]
		p.UID, p.GID = first.Creds.EUID, first.Creds.EGID
		p.Caps, _ = cap.FromBitmap(uint64(first.Creds.Effective))
		sort.Strings(p.Caps)
		p.NoNewPrivs = first.Creds.NoNewPrivs
		p.Seccomp = first.Seccomp.String()
	}
	return p
}

// mounts lists what has to be given to a restored container from outside.
func mounts(src *Source) ([]checkpoint.Mount, error) {
	external, err := src.Images.ExternalMounts()
	if err != nil {
		return nil, err
	}
	var spec specs.Spec
	if err := json.Unmarshal(src.Spec, &spec); err != nil {
		return nil, fmt.Errorf("runtime spec of the container: %w", err)
	}
	inSpec := make(map[string]specs.Mount, len(spec.Mounts))
	for _, m := range spec.Mounts {
		inSpec[m.Destination] = m
	}
	out := make([]checkpoint.Mount, 0, len(external))
	for _, m := range external {
		dest := m.ExternalKey
		if !strings.HasPrefix(dest, "/") {
			dest = m.Mountpoint
		}
		if dest == "/" {
			continue // the root filesystem, which the image brings
		}
		cm := checkpoint.Mount{Destination: dest, Type: m.Type, ReadOnly: m.Flags&unix.MS_RDONLY != 0}
		if s, ok := inSpec[dest]; ok && s.Type != "" {
			cm.Type = s.Type
		}
		out = append(out, cm)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Destination < out[j].Destination })
	return out, nil
}

// States of sockets, as in the kernel's net/tcp_states.h.
var socketStates = map[uint32]string{
	1: "established", 2: "syn-sent", 3: "syn-recv", 4: "fin-wait-1", 5: "fin-wait-2", 6: "time-wait",
	7: "unconnected", 8: "close-wait", 9: "last-ack", 10: "listen", 11: "closing",
}

// sockets lists the sockets that have an address.
func sockets(images *image.Dir) ([]checkpoint.Socket, error) {
	files, err := images.OpenFiles()
	if err != nil {
		return nil, err
	}
	var out []checkpoint.Socket
	for _, f := range files {
		switch {
		case f.Inet != nil:
			s := checkpoint.Socket{Protocol: protocol(f.Inet), State: state(f.Inet.State), Local: address(f.Inet.Local)}
			if f.Inet.Remote.Port() != 0 {
				s.Remote = address(f.Inet.Remote)
			}
			out = append(out, s)
		case f.Unix != nil && f.Unix.Name != "":
			name := f.Unix.Name
			if name[0] == 0 {
				name = "@" + name[1:]
			}
			out = append(out, checkpoint.Socket{Protocol: "unix", State: state(f.Unix.State), Local: api.Line(name)})
		}
	}
	sort.Slice(out, func(i, j int) bool {
		a, b := out[i], out[j]
		if a.Protocol != b.Protocol {
			return a.Protocol < b.Protocol
		}
		if a.Local != b.Local {
			return a.Local < b.Local
		}
		return a.Remote < b.Remote
	})
	return out, nil
}

func state(n uint32) string {
	if s, ok := socketStates[n]; ok {
		return s
	}
	return fmt.Sprintf("state %d", n)
}

func protocol(s *image.Inet) string {
	switch s.Type {
	case unix.SOCK_STREAM:
		return "tcp"
	case unix.SOCK_DGRAM:
		return "udp"
	}
	return fmt.Sprintf("ip/%d", s.Protocol)
}

func address(a netip.AddrPort) string {
	if !a.Addr().IsValid() {
		return fmt.Sprintf("*:%d", a.Port())
	}
	return a.String()
}
