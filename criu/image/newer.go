// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Fields of CRIU 4.1 and later that go-criu's types lack. Numbers and meaning
// are from CRIU's images/*.proto.
const (
	credsNoNewPrivs = 18 // creds_entry: uint32
	credsAmbient    = 19 // creds_entry: repeated uint32, low word first
	fileType        = 1  // file_entry, fdinfo_entry.type (3): a type that is not in go-criu's enumeration
)

// varints returns the values of a field of numbers that m's type does not know,
// packed or not. A field with another wire type is an error.
func varints(m proto.Message, field protowire.Number) ([]uint64, error) {
	var out []uint64
	in := []byte(m.ProtoReflect().GetUnknown())
	for len(in) > 0 {
		num, typ, n := protowire.ConsumeTag(in)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		in = in[n:]
		n = protowire.ConsumeFieldValue(num, typ, in)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		if num == field {
			v := in[:n]
			if typ == protowire.BytesType {
				v, _ = protowire.ConsumeBytes(v)
			} else if typ != protowire.VarintType {
				return nil, fmt.Errorf("field %d has wire type %d", num, typ)
			}
			for len(v) > 0 {
				x, k := protowire.ConsumeVarint(v)
				if k < 0 {
					return nil, protowire.ParseError(k)
				}
				out = append(out, x)
				v = v[k:]
			}
		}
		in = in[n:]
	}
	return out, nil
}

// unknownField is a field that this package does not know, in a message that
// it reads.
type unknownField struct {
	Message string // the message's name, e.g. creds_entry
	Field   int32
	NUL     bool // it is known, but has a NUL byte, behind which CRIU reads nothing
}

func (u unknownField) String() string { return fmt.Sprintf("field %d of %s", u.Field, u.Message) }

func hasNUL(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
	if !fd.IsList() {
		return strings.IndexByte(v.String(), 0) >= 0
	}
	for i := range v.List().Len() {
		if strings.IndexByte(v.List().Get(i).String(), 0) >= 0 {
			return true
		}
	}
	return false
}

// known are the fields that go-criu's types lack and that are read here, or that
// restore only what every process may set for itself.
var known = map[unknownField]bool{
	{Message: "creds_entry", Field: credsNoNewPrivs}: true,
	{Message: "creds_entry", Field: credsAmbient}:    true,
	{Message: "inventory_entry", Field: 12}:          true, // plugins_entry, read by readInventory
	{Message: "inventory_entry", Field: 13}:          true, // dump_criu_run_id
	{Message: "inventory_entry", Field: 14}:          true, // allow_uprobes
	{Message: "task_core_entry", Field: 22}:          true, // membarrier registrations
	{Message: "user_x86_xsave_entry", Field: 9}:      true, // shadow stack registers
	{Message: "thread_info_aarch64", Field: 5}:       true, // pac_keys
	{Message: "mm_entry", Field: 17}:                 true, // transparent huge pages switched off
	{Message: "memfd_inode_entry", Field: 9}:         true, // mode
	{Message: "ip_opts_entry", Field: 6}:             true, // type of service
	{Message: "ip_opts_entry", Field: 7}:             true, // time to live
	{Message: "inet_sk_entry", Field: 20}:            true, // TCP options
	{Message: "file_entry", Field: 22}:               true, // pidfd
	{Message: "netns_entry", Field: 10}:              true, // sysctls of an own network namespace
}

// unknownFields returns the fields in m and the messages in it that nothing here
// accounts for, at most a few.
func unknownFields(m protoreflect.Message, out []unknownField) []unknownField {
	const enough = 4
	in := []byte(m.GetUnknown())
	for len(in) > 0 && len(out) < enough {
		num, typ, n := protowire.ConsumeTag(in)
		if n < 0 {
			break // the decoder accepted it, so it cannot be
		}
		k := protowire.ConsumeFieldValue(num, typ, in[n:])
		if k < 0 {
			break
		}
		in = in[n+k:]
		u := unknownField{Message: string(m.Descriptor().Name()), Field: int32(num)}
		// A known field's number among the unknown ones is no value of the field.
		if !known[u] {
			out = append(out, u)
		}
	}
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if fd.Kind() == protoreflect.StringKind && hasNUL(fd, v) {
			out = append(out, unknownField{Message: string(m.Descriptor().Name()), Field: int32(fd.Number()), NUL: true})
		}
		if fd.Kind() != protoreflect.MessageKind {
			return len(out) < enough
		}
		if fd.IsList() {
			for i := range v.List().Len() {
				out = unknownFields(v.List().Get(i).Message(), out)
			}
		} else {
			out = unknownFields(v.Message(), out)
		}
		return len(out) < enough
	})
	return out
}
