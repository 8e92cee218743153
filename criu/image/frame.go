// SPDX-License-Identifier: Apache-2.0

package image

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Magic numbers at the head of image files (CRIU, criu/include/magic.h).
const (
	magicCommon    = 0x54564319 // before each file's own, except the inventory's
	magicInventory = 0x58313116
	magicPstree    = 0x50273030
	magicCore      = 0x55053847
	magicIDs       = 0x54432030
	magicMM        = 0x57492820
	magicFS        = 0x51403912
	magicFdinfo    = 0x56213732
	magicPagemap   = 0x56084025
	magicMounts    = 0x55563928
	magicFiles     = 0x56303138
	magicUTS       = 0x54473203
	magicNetNS     = 0x55933752
	magicPidNS     = 0x61157326
	magicSeccomp   = 0x64413049
	magicCPUInfo   = 0x61404013
	magicGhost     = 0x52583605
	magicCgroup    = 0x59383330
	magicRemap     = 0x59133954
)

// maxMessage bounds one message in bytes. The largest is a process's memory map:
// 65,530 mappings (vm.max_map_count) of at most 100 bytes.
const maxMessage = 16 << 20

const (
	// maxNested bounds the messages, strings and lists in one message: in the
	// encoding two bytes are enough for one, decoded it takes hundreds.
	maxNested = 1 << 19
	// fewNested is a length in bytes up to which what is in a message is not counted.
	fewNested = 64 << 10
	// maxDepth bounds how deeply messages may be nested. Only directories of control
	// groups are, each in the one above it.
	maxDepth = 100
)

func readFull(f *os.File, size int64) ([]byte, error) {
	p := make([]byte, size)
	if _, err := io.ReadFull(f, p); err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return p, nil
}

// frames takes an image file apart: what remains of it, and the number of the
// next message.
type frames struct {
	name string
	in   []byte
	n    int
}

// newFrames checks the magic numbers at the head of a file's content.
func newFrames(name string, in []byte, magic uint32) (*frames, error) {
	f := &frames{name: name, in: in}
	if magic != magicInventory {
		if v, ok := f.u32(); !ok || v != magicCommon {
			return nil, f.errorf("does not begin as a CRIU image of version 1.1 does")
		}
	}
	if v, ok := f.u32(); !ok || v != magic {
		return nil, f.errorf("begins with magic number %#x, %#x belongs there", v, magic)
	}
	return f, nil
}

func (f *frames) u32() (uint32, bool) {
	if len(f.in) < 4 {
		return 0, false
	}
	v := binary.LittleEndian.Uint32(f.in)
	f.in = f.in[4:]
	return v, true
}

func (f *frames) errorf(format string, args ...any) error {
	return fmt.Errorf("%w: %s %s", ErrFormat, f.name, fmt.Sprintf(format, args...))
}

// more reports whether another message follows.
func (f *frames) more() bool { return len(f.in) > 0 }

// next returns the next message's bytes.
func (f *frames) next() ([]byte, error) {
	size, ok := f.u32()
	if !ok || uint64(size) > uint64(len(f.in)) {
		return nil, f.errorf("ends in the middle of message %d", f.n)
	}
	if size > maxMessage {
		return nil, f.errorf("has a message of %d bytes, over the limit of %d", size, maxMessage)
	}
	p := f.in[:size]
	f.in = f.in[size:]
	f.n++
	return p, nil
}

// decode reads the next message into m. Fields that CRIU requires may be
// missing: an enumeration value that m's type does not know looks the same.
// Whoever needs them checks.
func (f *frames) decode(m proto.Message) error {
	p, err := f.next()
	if err != nil {
		return err
	}
	if left := maxNested; len(p) > fewNested && !countNested(p, m.ProtoReflect().Descriptor(), &left, maxDepth) {
		return f.errorf("message %d is damaged, or holds more than %d parts", f.n-1, maxNested)
	}
	if err := (proto.UnmarshalOptions{AllowPartial: true, RecursionLimit: maxDepth}).Unmarshal(p, m); err != nil {
		// The library says so with a space that is none, to keep others from reading it.
		return f.errorf("message %d: %s", f.n-1, strings.TrimSpace(strings.TrimPrefix(err.Error(), "proto:")))
	}
	if u := unknownFields(m.ProtoReflect(), nil); len(u) > 0 && u[0].NUL {
		return f.errorf("has a NUL byte in %s", u[0])
	} else if len(u) > 0 {
		return f.errorf("has %s, which this thaw does not know: it was written by a newer CRIU, use a newer thaw", u[0])
	}
	return nil
}

// countNested takes the number of parts with a length in an encoded message from left. It
// reports whether there were no more, and no deeper ones.
func countNested(in []byte, d protoreflect.MessageDescriptor, left *int, depth int) bool {
	for len(in) > 0 {
		num, typ, n := protowire.ConsumeTag(in)
		if n < 0 {
			return false
		}
		in = in[n:]
		n = protowire.ConsumeFieldValue(num, typ, in)
		if n < 0 || typ == protowire.StartGroupType {
			return false
		}
		if typ == protowire.BytesType {
			if *left--; *left < 0 {
				return false
			}
			if fd := d.Fields().ByNumber(num); fd != nil && fd.Kind() == protoreflect.MessageKind {
				v, _ := protowire.ConsumeBytes(in)
				if depth == 0 || !countNested(v, fd.Message(), left, depth-1) {
					return false
				}
			}
		}
		in = in[n:]
	}
	return true
}

// count returns how many messages follow; those behind one that is cut off count as
// none.
func (f *frames) count() (n int) {
	for in := f.in; len(in) >= 4; n++ {
		size := binary.LittleEndian.Uint32(in)
		if uint64(size) > uint64(len(in)-4) {
			break
		}
		in = in[4+size:]
	}
	return n
}

// frames returns the messages of a file, nil if there is no such file.
func (d *Dir) frames(name string, magic uint32) (*frames, error) {
	in, err := d.read(name)
	if in == nil || err != nil {
		return nil, err
	}
	return newFrames(name, in, magic)
}

// one reads the only message of a file into m. found is false if there is no
// such file.
func (d *Dir) one(name string, magic uint32, m proto.Message) (found bool, err error) {
	f, err := d.frames(name, magic)
	if f == nil || err != nil {
		return false, err
	}
	if err := f.decode(m); err != nil {
		return false, err
	}
	if f.more() {
		return false, f.errorf("has more than one message")
	}
	return true, nil
}

// all reads all messages of a file; each is passed to add. A file that is
// missing has none, as for CRIU.
func all[M proto.Message](d *Dir, name string, magic uint32, fresh func() M, add func(M) error) error {
	f, err := d.frames(name, magic)
	if f == nil || err != nil {
		return err
	}
	for f.more() {
		m := fresh()
		if err := f.decode(m); err != nil {
			return err
		}
		if err := add(m); err != nil {
			return err
		}
	}
	return nil
}
