// SPDX-License-Identifier: Apache-2.0

package admit

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/image"
)

// Running compares tasks as the kernel shows them with the spec, by the rules of
// Check: users, groups, capabilities, no_new_privs, seccomp mode, security labels and
// resource limits. What the kernel does not show of a task is its zero value. The
// differences' Image is what the kernel shows. The spec is one that Check has
// accepted.
func Running(tasks []image.Task, spec *specs.Spec) []Difference {
	c := newCheck(spec, Options{})
	c.tasks = tasks
	c.users()
	c.capabilitySets()
	c.resourceLimits()
	module := "apparmor"
	if spec.Process.SelinuxLabel != "" {
		module = "selinux"
	}
	c.threads(func(t *image.Task, i int) {
		c.noNewPrivs(t, i)
		c.mode(t, i, t.Threads[i].Seccomp)
		c.label(t, i, module)
	})
	return c.found
}
