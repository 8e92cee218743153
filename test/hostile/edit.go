// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/criu/image"
)

// inventoryMagic begins the only image that has no common magic number before its own.
const inventoryMagic = 0x58313116

// at is the place of a file in the state.
func (i *Image) at(name string) int {
	n := slices.IndexFunc(i.State, func(e Entry) bool { return e.Name == name })
	if n < 0 {
		panic(fmt.Sprintf("hostile: the good image has no %s", name))
	}
	return n
}

// first is the name of the first file with a prefix, whose number differs from dump to dump.
func (i *Image) first(prefix string) string {
	n := slices.IndexFunc(i.State, func(e Entry) bool { return strings.HasPrefix(e.Name, prefix) })
	if n < 0 {
		panic(fmt.Sprintf("hostile: the good image has no %s", prefix))
	}
	return i.State[n].Name
}

func (i *Image) content(name string) []byte { return bytes.Clone(i.State[i.at(name)].Content) }

// put replaces a file or adds it.
func (i *Image) put(name string, content []byte) {
	e := Regular(name, content)
	if n := slices.IndexFunc(i.State, func(e Entry) bool { return e.Name == name }); n >= 0 {
		i.State[n] = e
		return
	}
	i.State = append(i.State, e)
}

func (i *Image) remove(name string) { i.State = slices.Delete(i.State, i.at(name), i.at(name)+1) }

// copyOf adds a copy of a file under another name.
func (i *Image) copyOf(from, to string) { i.put(to, i.content(from)) }

// headSize is how many bytes magic numbers take in an image file.
func headSize(p []byte) int {
	if binary.LittleEndian.Uint32(p) == inventoryMagic {
		return 4
	}
	return 8
}

// frames takes an image file apart: its magic numbers and its messages.
func frames(p []byte) (head []byte, messages [][]byte) {
	n := headSize(p)
	head, p = p[:n:n], p[n:]
	for len(p) > 0 {
		size := binary.LittleEndian.Uint32(p)
		messages = append(messages, p[4:4+size])
		p = p[4+size:]
	}
	return head, messages
}

func framed(head []byte, messages ...[]byte) []byte {
	out := slices.Clone(head)
	for _, m := range messages {
		out = binary.LittleEndian.AppendUint32(out, uint32(len(m)))
		out = append(out, m...)
	}
	return out
}

// newImage is an image file of messages; magic is its own number.
func newImage(magic uint32, messages ...proto.Message) []byte {
	out := binary.LittleEndian.AppendUint32(nil, 0x54564319)
	out = binary.LittleEndian.AppendUint32(out, magic)
	for _, m := range messages {
		out = framed(out, encode(m))
	}
	return out
}

func encode(m proto.Message) []byte {
	p, err := (proto.MarshalOptions{AllowPartial: true, Deterministic: true}).Marshal(m)
	must(err)
	return p
}

// messages decodes the messages of a file, passes them to change, and encodes what that returns.
func messages[M proto.Message](i *Image, name string, change func([]M) []M) {
	head, raw := frames(i.content(name))
	var list []M
	for _, p := range raw {
		m, ok := reflect.New(reflect.TypeFor[M]().Elem()).Interface().(M)
		if !ok {
			panic("hostile: no message")
		}
		must((proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(p, m))
		list = append(list, m)
	}
	raw = nil
	for _, m := range change(list) {
		raw = append(raw, encode(m))
	}
	i.put(name, framed(head, raw...))
}

// message changes the first message of a file.
func message[M proto.Message](i *Image, name string, change func(M)) {
	messages(i, name, func(list []M) []M {
		change(list[0])
		return list
	})
}

// rawMessages changes the messages of a file in their encoding.
func rawMessages(i *Image, name string, change func([][]byte) [][]byte) {
	head, list := frames(i.content(name))
	i.put(name, framed(head, change(list)...))
}

// edit is a trick's Make that changes the first message of the first file with a prefix.
func edit[M proto.Message](prefix string, change func(M)) func(*Image) {
	return func(i *Image) { message(i, i.first(prefix), change) }
}

// pageSize is that of the pages in images.
const pageSize = image.PageSize
