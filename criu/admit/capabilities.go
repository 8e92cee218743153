// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"math/bits"
	"strings"

	"thaw.dev/thaw/criu/image"
)

// capabilityNames are the capabilities by number (linux/capability.h).
var capabilityNames = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_LOCK",
	"CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT", "CAP_SYS_ADMIN",
	"CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE",
	"CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM",
	"CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// Numbers of the capabilities that other checks ask for.
const (
	capDACOverride    = 1
	capDACReadSearch  = 2
	capSetGID         = 6
	capSetUID         = 7
	capSetPCAP        = 8
	capNetBindService = 10
	capNetAdmin       = 12
	capNetRaw         = 13
	capSysNice        = 23
	capWakeAlarm      = 35
	capAuditRead      = 37
)

// CapabilityNames returns the names of the capabilities in a set, in the order of
// their numbers; those without a name as "CAP_<number>".
func CapabilityNames(set image.Capabilities) []string {
	var out []string
	for v := uint64(set); v != 0; v &= v - 1 {
		n := bits.TrailingZeros64(v)
		if n < len(capabilityNames) {
			out = append(out, capabilityNames[n])
		} else {
			out = append(out, fmt.Sprintf("CAP_%d", n))
		}
	}
	return out
}

// grants are the spec's capability sets.
type grants struct {
	bounding, permitted, effective, inheritable, ambient image.Capabilities
}

func (c *check) grants() grants {
	if c.granted == nil { // every file asks
		c.granted = &grants{}
		if s := c.spec.Process.Capabilities; s != nil {
			*c.granted = grants{
				bounding: set(s.Bounding), permitted: set(s.Permitted), effective: set(s.Effective), inheritable: set(s.Inheritable), ambient: set(s.Ambient),
			}
		}
	}
	return *c.granted
}

// set returns the capabilities with those names. A name that is not known grants
// nothing.
func set(names []string) image.Capabilities {
	var out image.Capabilities
	for _, n := range names {
		for i, known := range capabilityNames {
			if strings.EqualFold(n, known) {
				out |= 1 << i
			}
		}
	}
	return out
}

// some names a few capabilities of a set.
func some(set image.Capabilities) string {
	const most = 4
	names := CapabilityNames(set)
	switch n := len(names); {
	case n == 0:
		return "none"
	case n > most:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ","), n-most)
	}
	return strings.Join(names, ",")
}

func (c *check) capabilities() error {
	c.capabilitySets()
	return nil
}

// capabilitySets compares all five sets of each thread with the spec's.
func (c *check) capabilitySets() {
	g := c.grants()
	permitted := g.permitted
	if c.spec.Process.User.UID == 0 {
		permitted |= g.bounding // what root gets when it executes a program
	}
	permitted &= g.bounding
	c.threads(func(t *image.Task, i int) {
		creds := &t.Threads[i].Creds
		for _, s := range []struct {
			field     string
			has, may  image.Capabilities
			inSection string
		}{
			{"bounding capabilities", creds.Bounding, g.bounding, "bounding"},
			{"permitted capabilities", creds.Permitted, permitted, "permitted"},
			// Whoever has a permitted capability can make it effective at any time.
			{"effective capabilities", creds.Effective, permitted, "effective"},
			{"inheritable capabilities", creds.Inheritable, g.inheritable, "inheritable"},
			{"ambient capabilities", creds.Ambient, g.ambient, "ambient"},
		} {
			if more := s.has &^ s.may; more != 0 {
				c.refuse(Difference{
					Field: s.field, Task: name(t, i), Image: some(more) + " too", Spec: some(s.may),
					Remedy: "grant them in the pod (securityContext.capabilities.add), or make the checkpoint from a container without them",
				})
			}
		}
	})
}
