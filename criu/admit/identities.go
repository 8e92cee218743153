// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"thaw.dev/thaw/criu/image"
)

// identities compares users and groups, and who logged in.
func (c *check) identities() error {
	c.logins()
	c.users()
	return nil
}

func (c *check) users() {
	u := c.spec.Process.User
	anyUser, anyGroup := c.maySet(capSetUID), c.maySet(capSetGID)
	groups := append([]uint32{u.GID}, u.AdditionalGids...)
	remedy := fmt.Sprintf("restore in a pod with the checkpoint's user (securityContext.runAsUser, runAsGroup, supplementalGroups), or make the checkpoint from one with user %d", u.UID)
	c.threads(func(t *image.Task, i int) {
		creds := &t.Threads[i].Creds
		for _, id := range creds.UIDs() {
			if id != u.UID && !anyUser {
				c.refuse(Difference{Field: "uid", Task: name(t, i), Image: fmt.Sprint(id), Spec: fmt.Sprint(u.UID), Remedy: remedy})
			}
		}
		if anyGroup {
			return
		}
		for _, id := range creds.GIDs() {
			if !slices.Contains(groups, id) {
				c.refuse(Difference{Field: "gid", Task: name(t, i), Image: fmt.Sprint(id), Spec: fmt.Sprint(groups), Remedy: remedy})
			}
		}
		for _, id := range creds.Groups {
			if !slices.Contains(groups, id) {
				c.refuse(Difference{Field: "supplementary group", Task: name(t, i), Image: fmt.Sprint(id), Spec: fmt.Sprint(groups), Remedy: remedy})
			}
		}
	})
}

// logins refuses tasks that the audit log would take for those of somebody who logged in.
// Containers are started by nobody who did, or by who started the daemon too.
func (c *check) logins() {
	for i := range c.tasks {
		t := &c.tasks[i]
		if t.LoginUID != image.NoLogin && t.LoginUID != ownLogin() {
			c.refuse(Difference{
				Field: "login user of the audit log", Task: name(t, 0), Image: fmt.Sprint(t.LoginUID), Spec: "none",
				Remedy: "make the checkpoint from a container that the node's services started",
			})
		}
	}
}

// ownLogin is the login user of this process.
func ownLogin() uint32 {
	p, err := os.ReadFile("/proc/self/loginuid")
	if err != nil {
		return image.NoLogin
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(p)), 10, 32)
	if err != nil {
		return image.NoLogin
	}
	return uint32(n)
}

// maySet reports whether the container's first process, as the spec starts it,
// can use a capability without executing a privileged file: root has what is
// permitted within the bounding set, others only what is ambient.
func (c *check) maySet(capability int) bool {
	g := c.grants()
	if c.spec.Process.User.UID == 0 {
		return (g.permitted|g.bounding)&g.bounding&(1<<capability) != 0
	}
	return g.ambient&(1<<capability) != 0
}
