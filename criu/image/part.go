// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	sk_opts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// part is what an entry says of a file beyond its type: a message of that type's own.
// Those of all types name what they have in common alike.
type part struct{ m protoreflect.Message }

// partOf returns an entry's only part; none for a type that go-criu does not know. CRIU
// finds the file by the number in it, here and in other images.
func partOf(e *fdinfo.FileEntry) (part, error) {
	var p part
	var err error
	e.ProtoReflect().Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if fd.Kind() != protoreflect.MessageKind {
			return true
		}
		if p.m != nil {
			err = fmt.Errorf("it is of two types")
			return false
		}
		p.m = v.Message()
		return true
	})
	if err == nil && p.m != nil && p.has("id") && p.number("id") != e.GetId() {
		err = fmt.Errorf("it is file %d too", p.number("id"))
	}
	return p, err
}

func (p part) has(name protoreflect.Name) bool {
	return p.m != nil && p.m.Descriptor().Fields().ByName(name) != nil
}

// number returns the value of a field; 0 if there is none of that name.
func (p part) number(name protoreflect.Name) uint32 {
	if !p.has(name) {
		return 0
	}
	v, ok := p.m.Get(p.m.Descriptor().Fields().ByName(name)).Interface().(uint32)
	if !ok {
		return 0
	}
	return v
}

func (p part) message(name protoreflect.Name) any {
	if !p.has(name) {
		return nil
	}
	return p.m.Get(p.m.Descriptor().Fields().ByName(name)).Message().Interface()
}

// owner is who gets the signals of the file; nil if nobody does.
func (p part) owner() *Owner {
	own, ok := p.message("fown").(*fown.FownEntry)
	if !ok || own.GetPid() == 0 {
		return nil
	}
	return &Owner{UID: own.GetUid(), EUID: own.GetEuid(), Signal: own.GetSignum(), PID: own.GetPid()}
}

// mark is SO_MARK of a socket.
func (p part) mark() uint32 {
	opts, ok := p.message("opts").(*sk_opts.SkOptsEntry)
	if !ok {
		return 0
	}
	return opts.GetSoMark()
}
