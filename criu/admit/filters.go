// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/criu/seccomp"
)

// WantsFilter reports whether a spec's seccomp section filters anything: a
// default action other than "allow", or any rule.
func WantsFilter(spec *specs.Spec) bool {
	if spec.Linux == nil || spec.Linux.Seccomp == nil {
		return false
	}
	s := spec.Linux.Seccomp
	return s.DefaultAction != specs.ActAllow || len(s.Syscalls) > 0
}

const sameProfile = "make the checkpoint from a pod with the same seccompProfile"

// seccomp compares the mode of a thread, and its filters if there are any.
func (c *check) seccomp(t *image.Task, i int, filters []image.Filter) {
	mode, innermost := t.SeccompOf(i, filters)
	if mode == image.SeccompFilter && int(innermost) >= len(filters) {
		c.refuse(Difference{Field: "seccomp", Task: name(t, i), Image: fmt.Sprintf("filter %d that is in no image", innermost), Spec: "a filter", Remedy: "the checkpoint is damaged: make it again"})
		return
	}
	c.mode(t, i, mode)
	if mode == image.SeccompFilter {
		c.filters(t, i, int(innermost), filters)
	}
}

func (c *check) mode(t *image.Task, i int, mode image.SeccompMode) {
	if WantsFilter(c.spec) && mode == image.SeccompDisabled || mode > image.SeccompFilter {
		c.refuse(Difference{Field: "seccomp", Task: name(t, i), Image: mode.String(), Spec: "a filter", Remedy: sameProfile})
	}
}

// filters checks that the spec's filter is in the chain of a thread, whose last link is
// given.
func (c *check) filters(t *image.Task, i, innermost int, filters []image.Filter) {
	for n := innermost; n >= 0; n = filters[n].Prev {
		c.filterFlags(t, i, filters[n].Flags)
	}
	if !WantsFilter(c.spec) {
		return
	}
	if c.opts.Filter == nil {
		if c.opts.Rootfs != "" {
			c.refuse(Difference{Field: "seccomp filter", Task: name(t, i), Image: "one", Spec: "one that is not known on this node", Remedy: "let shim and daemon be of the same version of thaw"})
		}
		return
	}
	var first error // of the oldest, which is the runtime's
	for n := innermost; n >= 0; n = filters[n].Prev {
		if first = c.strict(n, filters); first == nil {
			return
		}
	}
	c.refuse(Difference{Field: "seccomp filter", Task: name(t, i), Image: first.Error(), Spec: "a stricter one", Remedy: sameProfile})
}

// strict returns nil if a filter is as strict as the spec's.
func (c *check) strict(n int, filters []image.Filter) error {
	err, known := c.strictness[n]
	if !known {
		err = seccomp.Covers(filters[n].Program, c.opts.Filter, &c.budget)
		c.strictness[n] = err
	}
	return err
}

// filterFlags checks how a filter is installed: CRIU uses the image's flags. What they
// may be is what changes no rule, and the mitigation of speculation only if the spec
// has it off, as it has if it names no flags (runc, libcontainer/specconv).
func (c *check) filterFlags(t *image.Task, i int, flags uint32) {
	allowed := uint32(unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_LOG)
	if s := c.spec.Linux.Seccomp; s == nil || s.Flags == nil || slices.Contains(s.Flags, specs.LinuxSeccompFlagSpecAllow) {
		allowed |= unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
	}
	if more := flags &^ allowed; more != 0 {
		c.refuse(Difference{Field: "flags of a seccomp filter", Task: name(t, i), Image: fmt.Sprintf("%#x too", more), Spec: fmt.Sprintf("%#x", allowed), Remedy: sameProfile})
	}
}
