// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// encode frames messages as CRIU does.
func encode(t testing.TB, magic uint32, messages ...proto.Message) []byte {
	t.Helper()
	raw := make([][]byte, len(messages))
	for i, m := range messages {
		var err error
		if raw[i], err = proto.Marshal(m); err != nil {
			t.Fatal(err)
		}
	}
	return encodeRaw(magic, raw...)
}

func encodeRaw(magic uint32, messages ...[]byte) []byte {
	var b bytes.Buffer
	if magic != magicInventory {
		binary.Write(&b, binary.LittleEndian, uint32(magicCommon))
	}
	binary.Write(&b, binary.LittleEndian, magic)
	for _, m := range messages {
		binary.Write(&b, binary.LittleEndian, uint32(len(m)))
		b.Write(m)
	}
	return b.Bytes()
}

// entry encodes a message of varints: field 1 first.
func entry(fields ...uint64) []byte {
	var b []byte
	for i, v := range fields {
		if v == absent {
			continue
		}
		b = protowire.AppendTag(b, protowire.Number(i+1), protowire.VarintType)
		b = protowire.AppendVarint(b, v)
	}
	return b
}

// absent leaves a field out of entry.
const absent = 1<<64 - 1

// dir makes a directory of images of the files given.
func dir(t testing.TB, files map[string][]byte) *Dir {
	t.Helper()
	path := t.TempDir()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(path, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}
