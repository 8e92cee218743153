// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"strings"

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
	bits := uint32(secbitKeepCaps)
	if c.maySet(capSetPCAP) {
		bits = 0xff
	}
	c.threads(func(t *image.Task, i int) {
		creds := &t.Threads[i].Creds
		c.noNewPrivs(t, i)
		if creds.SecureBits&^bits != 0 {
			c.refuse(Difference{Field: "securebits", Task: name(t, i), Image: fmt.Sprintf("%#x", creds.SecureBits), Spec: "none that need CAP_SETPCAP", Remedy: "make the checkpoint from a container that does not set them"})
		}
		c.seccomp(t, i, filters)
		c.label(t, i, c.inventory.LSM)
		c.socketLabel(t, i)
	})
	return nil
}

func (c *check) noNewPrivs(t *image.Task, i int) {
	if c.spec.Process.NoNewPrivileges && !t.Threads[i].Creds.NoNewPrivs {
		c.refuse(Difference{
			Field: "no_new_privs", Task: name(t, i), Image: "not set", Spec: "set",
			Remedy: "make the checkpoint from a pod with allowPrivilegeEscalation: false",
		})
	}
}

// label compares security labels: the spec's must be the task's. The module is the one
// that the task's is of.
func (c *check) label(t *image.Task, i int, module string) {
	p := c.spec.Process
	got := t.Threads[i].Creds.LSMProfile
	// The kernel appends the profile's mode: "name (enforce)".
	profile, _, _ := strings.Cut(got, " (")
	if want := p.ApparmorProfile; want != "" && want != "unconfined" && (module != "apparmor" || profile != want) {
		c.refuse(Difference{
			Field: "AppArmor profile", Task: name(t, i), Image: unlabelled(got), Spec: quote(want),
			Remedy: "make the checkpoint from a pod with the same appArmorProfile",
		})
	}
	if want := p.SelinuxLabel; want != "" && (module != "selinux" || got != want) {
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
