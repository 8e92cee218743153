// SPDX-License-Identifier: Apache-2.0

package image

import (
	"encoding/json"
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
)

// maxDescriptor is the highest number that a descriptor can have: the kernel's limit
// of fs.nr_open on 64-bit machines is a little below it.
const maxDescriptor = 1<<30 - 1

// Descriptor is one file descriptor of a process.
type Descriptor struct {
	FD   uint32
	File uint32 // OpenFile.ID
	Type FileType
}

// Descriptors returns the file descriptors of a table (IDs.Files).
func (d *Dir) Descriptors(table uint32) ([]Descriptor, error) {
	name := fmt.Sprintf("fdinfo-%d.img", table)
	var out []Descriptor
	seen := make(map[uint32]bool)
	err := all(d, name, magicFdinfo, func() *fdinfo.FdinfoEntry { return &fdinfo.FdinfoEntry{} }, func(e *fdinfo.FdinfoEntry) error {
		const typeField = 3
		desc := Descriptor{FD: e.GetFd(), File: e.GetId(), Type: FileType(e.GetType())}
		if e.Type == nil {
			v, err := varints(e, typeField)
			if err != nil || len(v) != 1 {
				return fmt.Errorf("%w: %s: descriptor %d has no type", ErrFormat, name, desc.FD)
			}
			desc.Type = FileType(v[0])
		}
		if len(out) == maxOpenFiles {
			return fmt.Errorf("%w: %s has more than %d descriptors", ErrFormat, name, maxOpenFiles)
		}
		if desc.FD > maxDescriptor || seen[desc.FD] {
			return fmt.Errorf("%w: %s has descriptor %d twice, or out of range", ErrFormat, name, desc.FD)
		}
		seen[desc.FD] = true
		out = append(out, desc)
		return nil
	})
	return out, err
}

// StandardDescriptors returns what runc wrote down of the standard descriptors 0, 1 and 2
// of the container's first process: what each was, as in /proc/PID/fd. runc makes CRIU
// give those that are pipes to the processes, by these names and numbers.
func (d *Dir) StandardDescriptors() ([]string, error) {
	const name = "descriptors.json"
	in, err := d.read(name)
	if err != nil {
		return nil, err
	}
	if in == nil {
		return nil, fmt.Errorf("%w: %s is missing: dump with runc", ErrFormat, name)
	}
	var out []string
	if err := json.Unmarshal(in, &out); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrFormat, name, err)
	}
	return out, nil
}
