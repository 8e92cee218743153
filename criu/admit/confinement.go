// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/image"
)

// secbitKeepCaps is the only one of the securebits that every process may set
// (capabilities(7)).
const secbitKeepCaps = 1 << 4

// confinement compares what holds tasks back apart from capabilities.
func (c *check) confinement() error {
	filters, err := c.dir.Filters()
	if err != nil {
		return err
	}
	p := c.spec.Process
	bits := uint32(secbitKeepCaps)
	if c.maySet(capSetPCAP) {
		bits = 0xff
	}
	c.threads(func(t *image.Task, i int) {
		creds := &t.Threads[i].Creds
		if p.NoNewPrivileges && !creds.NoNewPrivs {
			c.refuse(Difference{
				Field: "no_new_privs", Task: name(t, i), Image: "not set", Spec: "set",
				Remedy: "make the checkpoint from a pod with allowPrivilegeEscalation: false",
			})
		}
		if creds.SecureBits&^bits != 0 {
			c.refuse(Difference{Field: "securebits", Task: name(t, i), Image: fmt.Sprintf("%#x", creds.SecureBits), Spec: "none that need CAP_SETPCAP", Remedy: "make the checkpoint from a container that does not set them"})
		}
		c.seccomp(t, i, filters)
		c.label(t, i)
		c.socketLabel(t, i)
	})
	return nil
}

func (c *check) seccomp(t *image.Task, i int, filters []image.Filter) {
	mode, filter := t.SeccompOf(i, filters)
	if mode == image.SeccompFilter && int(filter) >= len(filters) {
		c.refuse(Difference{Field: "seccomp", Task: name(t, i), Image: fmt.Sprintf("filter %d that is in no image", filter), Spec: "a filter", Remedy: "the checkpoint is damaged: make it again"})
		return
	}
	if c.wantsSeccomp() && mode == image.SeccompDisabled || mode > image.SeccompFilter {
		c.refuse(Difference{
			Field: "seccomp", Task: name(t, i), Image: mode.String(), Spec: "a filter",
			Remedy: "make the checkpoint from a pod with the same seccompProfile",
		})
	}
}

// wantsSeccomp reports whether the spec's seccomp section filters anything: a
// default action other than "allow", or any rule.
func (c *check) wantsSeccomp() bool {
	s := c.spec.Linux.Seccomp
	return s != nil && (s.DefaultAction != specs.ActAllow || len(s.Syscalls) > 0)
}

// label compares security labels: the spec's must be the task's.
func (c *check) label(t *image.Task, i int) {
	p := c.spec.Process
	got := t.Threads[i].Creds.LSMProfile
	// The kernel appends the profile's mode: "name (enforce)".
	profile, _, _ := strings.Cut(got, " (")
	if want := p.ApparmorProfile; want != "" && want != "unconfined" && (c.inventory.LSM != "apparmor" || profile != want) {
		c.refuse(Difference{
			Field: "AppArmor profile", Task: name(t, i), Image: unlabelled(got), Spec: quote(want),
			Remedy: "make the checkpoint from a pod with the same appArmorProfile",
		})
	}
	if want := p.SelinuxLabel; want != "" && (c.inventory.LSM != "selinux" || got != want) {
		c.refuse(Difference{
			Field: "SELinux label", Task: name(t, i), Image: unlabelled(got), Spec: quote(want),
			Remedy: "make the checkpoint from a pod with the same seLinuxOptions, level included",
		})
	}
}

// socketLabel compares the SELinux label of new sockets: CRIU sets it from the image.
func (c *check) socketLabel(t *image.Task, i int) {
	got, want := t.Threads[i].Creds.LSMSockCreate, c.spec.Process.SelinuxLabel
	if got != "" && got != want {
		c.refuse(Difference{
			Field: "SELinux label of new sockets", Task: name(t, i), Image: quote(got), Spec: unlabelled(want),
			Remedy: "make the checkpoint from a container that does not set it",
		})
	}
}

func unlabelled(s string) string {
	if s == "" {
		return "none"
	}
	return quote(s)
}
