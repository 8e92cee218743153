// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
)

// limitNames are the resource limits by their number (asm-generic/resource.h).
var limitNames = []string{
	"RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_CORE", "RLIMIT_RSS", "RLIMIT_NPROC", "RLIMIT_NOFILE",
	"RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_LOCKS", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME",
}

// limits compares the resource limits that the spec sets, and priorities.
func (c *check) limits() error {
	for i := range c.tasks {
		if t := &c.tasks[i]; len(t.Limits) > len(limitNames) {
			return fmt.Errorf("%w: core-%d.img has %d resource limits", image.ErrFormat, t.PID, len(t.Limits))
		}
	}
	c.resourceLimits()
	c.priorities()
	return nil
}

// resourceLimits compares the limits that the spec sets. Those that it does not set are
// the runtime's own and are left alone.
func (c *check) resourceLimits() {
	for i := range c.tasks {
		t := &c.tasks[i]
		if t.State.Gone() {
			continue
		}
		for _, want := range c.spec.Process.Rlimits {
			n := slices.Index(limitNames, want.Type)
			has := "none, which leaves the runtime's own"
			if n >= 0 && n < len(t.Limits) {
				if t.Limits[n].Hard <= want.Hard {
					continue
				}
				has = fmt.Sprint(t.Limits[n].Hard)
			}
			c.refuse(Difference{
				Field: want.Type, Task: name(t, 0), Image: has, Spec: fmt.Sprint(want.Hard),
				Remedy: "make the checkpoint from a container with the same limits",
			})
		}
	}
}

func (c *check) priorities() {
	if c.maySet(capSysNice) {
		return
	}
	c.threads(func(t *image.Task, i int) {
		th := &t.Threads[i]
		realtime := th.Policy == unix.SCHED_FIFO || th.Policy == unix.SCHED_RR || th.Policy == unix.SCHED_DEADLINE
		if th.Nice < 0 || realtime {
			c.refuse(Difference{
				Field: "scheduling", Task: name(t, i), Image: fmt.Sprintf("nice %d, policy %d", th.Nice, th.Policy), Spec: "no CAP_SYS_NICE",
				Remedy: "grant it in the pod (securityContext.capabilities.add), or make the checkpoint from a container without such a priority",
			})
		}
	})
}
