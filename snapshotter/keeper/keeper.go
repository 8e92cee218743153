// SPDX-License-Identifier: Apache-2.0

// Package keeper has the node daemon hold userfaultfds for the case that a shim and
// its guard (package guard) are killed together, as all of a service's processes are.
//
// When the last descriptor of a userfaultfd closes, the kernel hands out zero
// pages where pages are missing, and the process runs on with wrong memory. So a
// shim gives duplicates of its descriptors to the node daemon, which holds them.
// When the shim says that no page is missing any more, or that the processes are
// gone, the daemon closes them. When the shim dies without that, the daemon kills
// the container's processes, waits until they are dead, and only then closes the
// descriptors. A connection that breaks is no death: what came over it is held
// until the shim's process is dead, or has given all of it anew.
//
// The protocol runs over a unix socket of the type SOCK_SEQPACKET, one connection
// for each container. Each message of the client is a packet with a JSON object
// (message), with at most one descriptor attached as SCM_RIGHTS; the daemon
// answers each with a packet holding a JSON object (reply) once it has done what
// was asked. A client whose connection broke, because the daemon was restarted or
// did not answer in time, connects again, sends everything anew and then Complete.
//
// The package is used by the shim and imports little.
package keeper

const (
	// maxMessage bounds a packet in bytes.
	maxMessage = 64 << 10
)

// Container says which processes die when their page handler does.
type Container struct {
	// RestoreID is the restore, for logs.
	RestoreID string `json:"restore_id"`
	// Cgroups are the container's cgroups as paths below /sys/fs/cgroup: one on
	// cgroup v2, one for each hierarchy that lists processes on v1.
	Cgroups []string `json:"cgroups,omitempty"`
}

// message is what a client sends.
type message struct {
	Container
	// Hold is the number under which the attached descriptor is held from now
	// on; 0 if none is attached.
	Hold uint64 `json:"hold,omitempty"`
	// Forget is the number of a descriptor to be closed; 0 for none.
	Forget uint64 `json:"forget,omitempty"`
	// Complete says that this connection has all that is to be held: what is held
	// for earlier ones of the same process and restore may go.
	Complete bool `json:"complete,omitempty"`
	// Done says that all descriptors may be closed and nobody be killed.
	Done bool `json:"done,omitempty"`
}

// reply is the answer to a message.
type reply struct {
	Error string `json:"error,omitempty"`
}
