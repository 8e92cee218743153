// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"strings"

	"thaw.dev/thaw/criu/image"
)

// names refuses files that CRIU does not write, and those that it would only
// need to build what a container may not bring along.
func (c *check) names() error {
	for _, f := range c.dir.Files() {
		switch f.Kind {
		case image.Unknown:
			c.refuse(Difference{
				Field: "image files", Image: quote(f.Name), Spec: "no use for it",
				Remedy: "make the checkpoint again with this thaw's `thaw checkpoint` or `thaw convert`",
			})
		case image.External:
			// Addresses, routes and packet filters are applied by programs of the
			// host, with what the image says as their input.
			c.refuse(Difference{
				Field: "network namespace", Image: "a configuration of its own (" + quote(f.Name) + ")", Spec: "the pod's network",
				Remedy: "make the checkpoint from a container in a pod, whose network the runtime sets up",
			})
		}
		for _, s := range strange {
			if strings.HasPrefix(f.Name, s.prefix) {
				c.refuse(Difference{Field: s.field, Image: s.image + " (" + quote(f.Name) + ")", Spec: s.spec, Remedy: "make the checkpoint from a container without " + s.without})
			}
		}
	}
	return nil
}

// strange are images of what no container may bring along.
var strange = []struct{ prefix, field, image, spec, without string }{
	{"apparmor.img", "security module", "AppArmor policies to load", "the node's own policies", "AppArmor policies of its own"},
	{"netdev-", "network namespace", "network devices", "the pod's network", "a network of its own"},
	{"userns-", "user namespace", "one of its own", "users of the node", "hostUsers: false"},
	{"bpfmap-", "open file", "BPF maps", "no right to them", "BPF maps"},
}

// descriptors checks runc's list of the standard descriptors. runc tells CRIU to put the
// descriptors of its own that have these numbers in the place of the pipes that the list names: with a
// fourth entry, a process of the container would get the connection over which runc commands CRIU.
func (c *check) descriptors() error {
	const standard = 3
	list, err := c.dir.StandardDescriptors()
	if err != nil {
		return err
	}
	if len(list) != standard {
		c.refuse(Difference{
			Field: "standard descriptors", Image: fmt.Sprintf("%d in descriptors.json", len(list)), Spec: fmt.Sprint(standard),
			Remedy: "make the checkpoint again with runc",
		})
	}
	for _, d := range list {
		number, pipe := strings.CutPrefix(d, "pipe:[")
		number = strings.TrimSuffix(number, "]")
		if strings.Contains(d, "pipe:") && (!pipe || number == "" || strings.Trim(number, "0123456789") != "") {
			c.refuse(Difference{Field: "standard descriptors", Image: quote(d) + " in descriptors.json", Spec: "files, or pipes by their numbers", Remedy: "make the checkpoint again with runc"})
		}
	}
	return nil
}

// dump refuses what the dump as a whole asks of CRIU.
func (c *check) dump() error {
	if len(c.inventory.Plugins) > 0 {
		c.refuse(Difference{
			Field: "CRIU plugins", Image: "need of " + quote(c.inventory.Plugins[0]), Spec: "none",
			Remedy: "checkpoints with devices that need a plugin are not supported",
		})
	}
	if c.inventory.AllowUprobes {
		c.refuse(Difference{
			Field: "uprobes", Image: "tasks that were traced", Spec: "no tracing",
			Remedy: "stop the tracing and make the checkpoint again",
		})
	}
	return nil
}
