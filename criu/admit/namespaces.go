// SPDX-License-Identifier: Apache-2.0

package admit

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/image"
)

// Keys under which runc gives namespaces to CRIU (runc,
// libcontainer/criu_linux.go).
const netKey = "extRootNetNS"

const ownPodPID = "restore in a pod without shareProcessNamespace or hostPID (with crictl: namespace_options.pid: 1)"

// namespace returns the spec's namespace of a type.
func (c *check) namespace(t specs.LinuxNamespaceType) (path string, ok bool) {
	for _, n := range c.spec.Linux.Namespaces {
		if n.Type == t {
			return n.Path, true
		}
	}
	return "", false
}

func (c *check) namespaces() error {
	root := &c.tasks[0]
	if root.State.Gone() {
		c.refuse(Difference{Field: "first process", Task: name(root, 0), Image: "a process that has exited", Spec: "a running container", Remedy: "make the checkpoint again while the container runs"})
		return nil
	}
	host := c.inventory.Root
	for i := range c.tasks {
		t := &c.tasks[i]
		if t.State.Gone() {
			continue
		}
		for _, ns := range []struct {
			name string
			id   func(image.IDs) uint32
		}{
			{"PID", func(x image.IDs) uint32 { return x.PidNS }},
			{"network", func(x image.IDs) uint32 { return x.NetNS }},
			{"IPC", func(x image.IDs) uint32 { return x.IpcNS }},
			{"UTS", func(x image.IDs) uint32 { return x.UtsNS }},
			{"mount", func(x image.IDs) uint32 { return x.MountNS }},
			{"user", func(x image.IDs) uint32 { return x.UserNS }},
			{"cgroup", func(x image.IDs) uint32 { return x.CgroupNS }},
			{"time", func(x image.IDs) uint32 { return x.TimeNS }},
		} {
			if ns.id(t.IDs) != ns.id(root.IDs) {
				c.refuse(Difference{
					Field: ns.name + " namespace", Task: name(t, 0), Image: "one of its own inside the container", Spec: "one for the whole container",
					Remedy: "nested namespaces cannot be restored: make the checkpoint without the nested container or sandbox",
				})
			}
		}
	}
	c.pidNamespace(root.IDs, host)
	if err := c.netNamespace(root.IDs, host); err != nil {
		return err
	}
	if root.IDs.UserNS != host.UserNS {
		c.refuse(Difference{Field: "user namespace", Image: "one of its own", Spec: "users of the node", Remedy: "checkpoints of pods with hostUsers: false are not supported"})
	}
	if _, ok := c.namespace(specs.UserNamespace); ok {
		c.refuse(Difference{Field: "user namespace", Image: "users of the node", Spec: "one of its own", Remedy: "restore in a pod without hostUsers: false"})
	}
	for _, ns := range []struct {
		typ      specs.LinuxNamespaceType
		name     string
		got, all uint32
		remedy   string
	}{
		{specs.MountNamespace, "mount", root.IDs.MountNS, host.MountNS, "make the checkpoint from an ordinary container"},
		{specs.IPCNamespace, "IPC", root.IDs.IpcNS, host.IpcNS, "make the checkpoint from a pod without hostIPC"},
		{specs.UTSNamespace, "UTS", root.IDs.UtsNS, host.UtsNS, "make the checkpoint from a pod without hostNetwork"},
		{specs.CgroupNamespace, "cgroup", root.IDs.CgroupNS, host.CgroupNS, "make the checkpoint on a node with the same version of cgroups"},
	} {
		if _, ok := c.namespace(ns.typ); ok && ns.got == ns.all {
			c.refuse(Difference{Field: ns.name + " namespace", Image: "the host's", Spec: "one of its own", Remedy: ns.remedy})
		}
	}
	return nil
}

func (c *check) pidNamespace(ids, host image.IDs) {
	path, ok := c.namespace(specs.PIDNamespace)
	switch {
	case !ok:
		c.refuse(Difference{Field: "PID namespace", Image: "process numbers of its own", Spec: "the node's process numbers", Remedy: "they may be taken: " + ownPodPID})
	case path != "":
		c.refuse(Difference{Field: "PID namespace", Image: "process numbers of its own", Spec: "process numbers shared with the pod", Remedy: "they may be taken: " + ownPodPID})
	}
	// A shared namespace at the dump has its image, with the key that runc gave it.
	_, external, err := c.dir.PidKey(ids.PidNS)
	if ids.PidNS == host.PidNS || external || err != nil {
		c.refuse(Difference{
			Field: "PID namespace", Image: "process numbers shared with others", Spec: "process numbers of its own",
			Remedy: "make the checkpoint from a pod without shareProcessNamespace or hostPID",
		})
	}
}

func (c *check) netNamespace(ids, host image.IDs) error {
	key, dumped, err := c.dir.NetKey(ids.NetNS)
	if err != nil {
		return err
	}
	path, ok := c.namespace(specs.NetworkNamespace)
	switch {
	case ids.NetNS == host.NetNS && !dumped:
		if ok {
			c.refuse(Difference{Field: "network namespace", Image: "the host's", Spec: "the pod's", Remedy: "make the checkpoint from a pod without hostNetwork, or restore in one with it"})
		}
	case dumped && key != netKey && key != "":
		c.refuse(Difference{
			Field: "network namespace", Image: "one of the name " + quote(key), Spec: "the pod's", Remedy: "make the checkpoint with runc, from a container in a pod",
		})
	case !dumped || key == "":
		c.refuse(Difference{
			Field: "network namespace", Image: "one that it brings along", Spec: "the pod's", Remedy: "make the checkpoint from a container in a pod, whose network the runtime sets up",
		})
	case !ok || path == "":
		c.refuse(Difference{Field: "network namespace", Image: "a pod's", Spec: "the host's or a new one", Remedy: "restore in a pod without hostNetwork"})
	}
	return nil
}
