// SPDX-License-Identifier: Apache-2.0

package admit

import "thaw.dev/thaw/criu/image"

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
		if f.Name == "apparmor.img" {
			c.refuse(Difference{
				Field: "security module", Image: "AppArmor policies to load (apparmor.img)", Spec: "the node's own policies",
				Remedy: "make the checkpoint from a container without AppArmor policies of its own",
			})
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
