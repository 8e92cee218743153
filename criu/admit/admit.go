// SPDX-License-Identifier: Apache-2.0

// Package admit decides whether CRIU's images may run as a container with a
// given OCI spec.
//
// A restore takes users, capabilities, seccomp, no_new_privs, security labels
// and mounts from the images; runc applies none of the spec's. So everything that
// an image brings along is compared with the spec first, and a restore is refused
// unless the spec grants it. What the images have less of than the spec allows is
// no reason to refuse.
//
// The measure is what a cold start under the same spec could have come to: a
// process that starts as root with CAP_SETUID may have children with any uid, one
// that starts without may not. In one point the rule is stricter: where the spec's
// user is not root, a task that came to another uid through a set-user-ID program
// is refused, because "the pod does not run as root" is what such a spec is for.
//
// Seccomp filters are compared with the one that the node's runtime makes of the
// spec: it, or one that is at least as strict, must be in the chain of each thread. More
// filters, which a program installed itself, only take away.
//
// What is not compared: limits that the spec leaves to the runtime, and whether
// memory may be dumped, which every process decides for itself; CRIU turns it off
// where it cannot have what the image says.
package admit

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/criu/seccomp"
)

// Difference is one thing that the images have and the spec does not grant.
type Difference struct {
	Field  string // e.g. "bounding capabilities"
	Task   string // `task 1 (python3)`; "" if it is not about one task
	Image  string // what the images have
	Spec   string // what the spec has
	Remedy string
}

func (d Difference) String() string {
	var b strings.Builder
	if d.Task != "" {
		b.WriteString(d.Task + ": ")
	}
	fmt.Fprintf(&b, "%s: the checkpoint has %s, the pod's spec has %s", d.Field, d.Image, d.Spec)
	if d.Remedy != "" {
		b.WriteString("; " + d.Remedy)
	}
	return b.String()
}

const (
	// maxShown is how many differences an error's text names.
	maxShown = 3
	// maxPerField bounds the differences that are collected for one field: a bad
	// field in a thousand tasks is one mistake.
	maxPerField = 4
	// maxFound bounds all of them: each mount is a field of its own.
	maxFound = 256
	// maxPath bounds a path in bytes, as the kernel does (PATH_MAX).
	maxPath = 4096
)

// Refusal is the error of Check: the first differences that were found. It is an
// errdefs.ErrFailedPrecondition.
type Refusal struct {
	Differences []Difference
}

func (r *Refusal) Error() string {
	var b strings.Builder
	b.WriteString("the checkpoint may not run in this pod: ")
	// Each field once, each remedy once: several tasks mostly have the same fault.
	var fields, remedies []string
	for _, d := range r.Differences {
		field := d.Field
		if strings.HasSuffix(field, " capabilities") { // the five sets mostly differ together
			field = "capabilities"
		}
		if slices.Contains(fields, field) || len(fields) == maxShown {
			continue
		}
		if len(fields) > 0 {
			b.WriteString(" | ")
		}
		fields = append(fields, field)
		if slices.Contains(remedies, d.Remedy) {
			d.Remedy = ""
		}
		remedies = append(remedies, d.Remedy)
		b.WriteString(d.String())
	}
	if n := len(r.Differences) - len(fields); n > 0 {
		fmt.Fprintf(&b, " (and %d more)", n)
	}
	return b.String()
}

// Is makes errors.Is recognise the class.
func (r *Refusal) Is(target error) bool { return target == errdefs.ErrFailedPrecondition }

// Options are what a check needs to know of the node. The zero value is right
// for a check that does not have the container's root filesystem.
type Options struct {
	// Rootfs is where the container's root filesystem is mounted. With it, links in
	// it are followed: in mount destinations, as the runtime does before it names
	// mounts to CRIU, and in the paths of files and sockets, as CRIU does when it
	// opens them as root. Without it a destination and a mount of the same path
	// without /var match for /var/run only, and paths are taken for what they say:
	// that is good for an early answer, but no restore may go without a check that
	// has a root filesystem.
	Rootfs string
	// Filter is the program that the node's runtime makes of the spec's seccomp
	// section (struct sock_filter). Without it an early answer does not compare
	// filters; a check with a root filesystem refuses, if the spec wants one.
	Filter []byte
	// Exists reports whether a path below /proc or /sys is there on this node:
	// the runtime masks only paths that are. nil stands for this process's own.
	Exists func(path string) bool
}

// Check compares images with the spec of the container that they are to run in.
// It returns nil, a *Refusal, or an error of package image if the images are
// damaged. It reads no memory pages and takes a time in proportion to the number
// of tasks, mounts and files.
func Check(d *image.Dir, spec *specs.Spec, opts Options) error {
	if spec.Process == nil || spec.Linux == nil || spec.Root == nil {
		return fmt.Errorf("the spec has no process, root or linux section: %w", errdefs.ErrInvalidArgument)
	}
	if opts.Exists == nil {
		opts.Exists = func(p string) bool {
			_, err := os.Lstat(p)
			return err == nil
		}
	}
	c := newCheck(spec, opts)
	c.dir = d
	// Names first: nothing else is read from a directory with strangers in it.
	if err := c.names(); err != nil {
		return err
	}
	if len(c.found) > 0 {
		return &Refusal{c.found}
	}
	var err error
	if opts.Rootfs != "" {
		if c.rootfs, err = openRootfs(opts.Rootfs); err != nil {
			return err
		}
		defer c.rootfs.close()
	}
	if c.inventory, err = d.Inventory(); err != nil {
		return err
	}
	if c.tasks, err = d.Tasks(); err != nil {
		return err
	}
	for _, theme := range []func() error{
		c.dump, c.descriptors, c.namespaces, c.capabilities, c.confinement, c.identities, c.limits,
		c.mounts, c.archives, c.files, c.ghosts, c.cgroups, c.memory,
	} {
		if err := theme(); err != nil {
			if len(c.found) > 0 { // what came first is the better reason
				return &Refusal{c.found}
			}
			return err
		}
	}
	if len(c.found) > 0 {
		return &Refusal{c.found}
	}
	return nil
}

// check is one run of Check.
type check struct {
	dir       *image.Dir
	spec      *specs.Spec
	opts      Options
	inventory *image.Inventory
	granted   *grants
	tasks     []image.Task
	places    map[string]specs.Mount // see destinations
	rootfs    *rootfs                // nil without one
	mountIDs  map[uint32]bool        // of all mounts
	// givenDevices are the filesystems that the restore is given: the root and the
	// external mounts. CRIU takes a mount of the same device for a bind mount of them.
	givenDevices map[uint32]bool
	// tmpfsLinks are the symbolic links in all tmpfs mounts, without their mount
	// points.
	tmpfsLinks map[string]bool
	linkBytes  int           // in their paths
	strictness map[int]error // of filters by their index: nil for those as strict as the spec's
	budget     int           // see seccomp.Covers
	found      []Difference
}

func newCheck(spec *specs.Spec, opts Options) *check {
	return &check{
		spec: spec, opts: opts, tmpfsLinks: make(map[string]bool),
		strictness: make(map[int]error), budget: seccomp.MaxSteps,
	}
}

func (c *check) refuse(d Difference) {
	if len(c.found) == maxFound {
		return
	}
	n := 0
	for i := range c.found {
		if c.found[i].Field == d.Field {
			n++
		}
	}
	if n < maxPerField {
		c.found = append(c.found, d)
	}
}

// threads calls f for each thread of each task that was alive.
func (c *check) threads(f func(t *image.Task, i int)) {
	for i := range c.tasks {
		t := &c.tasks[i]
		for j := range t.Threads {
			f(t, j)
		}
	}
}

// name names a thread in messages.
func name(t *image.Task, i int) string {
	if i == 0 {
		return fmt.Sprintf("task %d (%s)", t.PID, quote(t.Comm))
	}
	return fmt.Sprintf("thread %d of task %d (%s)", t.Threads[i].TID, t.PID, quote(t.Comm))
}

// quote makes a string from an image safe and short enough for a message: no
// control characters, no line breaks, nothing that a terminal would obey.
func quote(s string) string {
	const most = 128
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.Trim(strconv.QuoteToASCII(s), `"`)
}

// inside reports whether p is an absolute path in its shortest form, of a length that paths can have.
func inside(p string) bool {
	return len(p) < maxPath && strings.HasPrefix(p, "/") && path.Clean(p) == p && !strings.ContainsRune(p, 0)
}
