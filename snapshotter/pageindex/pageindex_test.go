// SPDX-License-Identifier: Apache-2.0

package pageindex

import (
	"bytes"
	"encoding/binary"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
)

func sample(t testing.TB) *Index {
	t.Helper()
	chunk := func(b byte, size, pages uint32) Chunk {
		c := Chunk{Size: size, Pages: pages}
		c.SHA256[0] = b
		return c
	}
	a, err := NewBlob(digest.FromString("a"), []Chunk{chunk(1, 100, 32), chunk(2, 4096, 1), chunk(3, 9, 7)})
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewBlob(digest.FromString("b"), []Chunk{chunk(4, 50, 2)})
	if err != nil {
		t.Fatal(err)
	}
	return &Index{
		Blobs: []Blob{a, b},
		Processes: []Process{
			{PID: 1, Runs: []Run{
				{Start: 0x400000, Pages: 30, Blob: 0, Page: 0},
				{Start: 0x400000 + 30*PageSize, Pages: 5, Blob: Zero},
				{Start: 0x800000, Pages: 10, Blob: 0, Page: 30},
				{Start: 0x7fff00000000, Pages: 2, Blob: 1, Page: 0},
			}},
			{PID: 7},
		},
	}
}

func TestRoundTrip(t *testing.T) {
	x := sample(t)
	enc, err := x.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(enc)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(x, got) {
		t.Fatalf("got %+v, want %+v", got, x)
	}
}

// TestRecords: a chunk's record has the layout of the specification, wherever in memory the index lies.
func TestRecords(t *testing.T) {
	enc, err := sample(t).Encode()
	if err != nil {
		t.Fatal(err)
	}
	for shift := range 8 {
		moved := append(make([]byte, shift, shift+len(enc)), enc...)[shift:]
		x, err := Parse(moved)
		if err != nil {
			t.Fatal(err)
		}
		record := enc[headerSize+blobRecord:]
		for i, c := range x.Blobs[0].Chunks {
			if !bytes.Equal(c.SHA256[:], record[:32]) || c.Size != binary.LittleEndian.Uint32(record[32:]) || c.Pages != binary.LittleEndian.Uint32(record[36:]) {
				t.Errorf("shifted by %d: chunk %d is %v, its record %x", shift, i, c, record[:40])
			}
			record = record[40:]
		}
		if again, err := x.Encode(); err != nil || !bytes.Equal(again, enc) {
			t.Errorf("shifted by %d: not the same when encoded again (%v)", shift, err)
		}
	}
}

func TestPlaces(t *testing.T) {
	x := sample(t)
	b := &x.Blobs[0]
	if b.Size() != 4205 || b.Pages() != 40 {
		t.Fatalf("size %d pages %d", b.Size(), b.Pages())
	}
	for page, want := range map[uint64]int{0: 0, 31: 0, 32: 1, 33: 2, 39: 2} {
		if got := b.ChunkOf(page); got != want {
			t.Errorf("page %d: chunk %d, want %d", page, got, want)
		}
	}
	if p, ok := x.Process(7); !ok || p.PID != 7 {
		t.Error("process 7 not found")
	}
	if _, ok := x.Process(2); ok {
		t.Error("process 2 found")
	}
}

func TestKeyIsContent(t *testing.T) {
	x := sample(t)
	x.ComputeKeys()
	same, _ := NewBlob(digest.FromString("other"), x.Blobs[0].Chunks)
	if same.Key() != x.Blobs[0].Key() {
		t.Error("the same chunks have two keys")
	}
	changed := append([]Chunk(nil), x.Blobs[0].Chunks...)
	changed[1].Pages++
	other, _ := NewBlob(x.Blobs[0].Digest, changed)
	if other.Key() == x.Blobs[0].Key() {
		t.Error("other chunks have the same key")
	}
}

// TestRefused has one case for each way in which an index can lie.
func TestRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		lie  func(*Index)
		want string
	}{
		"overlap":          {func(x *Index) { x.Processes[0].Runs[2].Start = 0x400000 + 34*PageSize }, "overlaps"},
		"unaligned":        {func(x *Index) { x.Processes[0].Runs[0].Start++ }, "page-aligned"},
		"empty run":        {func(x *Index) { x.Processes[0].Runs[0].Pages = 0 }, "empty"},
		"address space":    {func(x *Index) { x.Processes[0].Runs[3].Start = maxAddress - PageSize }, "address space"},
		"pages overflow":   {func(x *Index) { x.Processes[0].Runs[3].Pages = 1 << 60 }, "address space"},
		"no such blob":     {func(x *Index) { x.Processes[0].Runs[0].Blob = 2 }, "blob 2"},
		"no such page":     {func(x *Index) { x.Processes[0].Runs[2].Page = 31 }, "which has 40"},
		"order of pids":    {func(x *Index) { x.Processes[1].PID = 1 }, "process 1 after"},
		"chunk pages zero": {func(x *Index) { x.Blobs[0].Chunks[0].Pages = 0; x.Blobs[0].offsets = nil }, "has 0 pages"},
		"chunk too large":  {func(x *Index) { x.Blobs[0].Chunks[0].Pages = 1025; x.Blobs[0].offsets = nil }, "1025 pages"},
		"frame too large":  {func(x *Index) { x.Blobs[0].Chunks[1].Size = 5000; x.Blobs[0].offsets = nil }, "5000 bytes"},
		"digest":           {func(x *Index) { x.Blobs[0].Digest = "sha256:zz" }, "sha256 is required"},
	} {
		t.Run(name, func(t *testing.T) {
			x := sample(t)
			tc.lie(x)
			_, err := x.Encode()
			if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestDamaged(t *testing.T) {
	enc, err := sample(t).Encode()
	if err != nil {
		t.Fatal(err)
	}
	for n := range enc {
		if _, err := Parse(enc[:n]); !errors.Is(err, ErrFormat) {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
	if _, err := Parse(append(enc[:len(enc):len(enc)], 0)); !errors.Is(err, ErrFormat) {
		t.Fatalf("trailing byte: %v", err)
	}
	v2 := append([]byte(nil), enc...)
	binary.LittleEndian.PutUint16(v2[8:], 2)
	if _, err := Parse(v2); err == nil || !strings.Contains(err.Error(), "format version 2 is not supported") {
		t.Fatalf("version: %v", err)
	}
}

// TestTooMany: small input that would be large in memory is refused before it is.
func TestTooMany(t *testing.T) {
	header := func(blobs, processes uint32) []byte {
		out := append([]byte(magic), Major, 0, 0, 0)
		for _, v := range []uint32{PageSize, blobs, processes} {
			out = binary.LittleEndian.AppendUint32(out, v)
		}
		return out
	}
	runs := binary.AppendUvarint([]byte{1}, maxEntries/2)
	for range maxEntries / 2 {
		runs = append(runs, 0, 1<<2|kindZero)
	}
	again := append([]byte{2}, runs[1:]...)
	for name, tc := range map[string]struct {
		in   []byte
		want error
	}{
		"runs":      {append(append(header(0, 2), runs...), again...), errEntries},
		"processes": {append(header(0, maxEntries+1), make([]byte, 2*maxEntries+2)...), errEntries},
		"blobs":     {append(header(maxBlobs+1, 0), make([]byte, (maxBlobs+1)*blobRecord)...), errBlobs},
	} {
		if _, err := Parse(tc.in); !errors.Is(err, tc.want) || !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Parse(append(header(0, 1), runs...)); err != nil {
		t.Errorf("as many as are allowed: %v", err)
	}
	x := &Index{Processes: []Process{{PID: 1, Runs: make([]Run, maxEntries)}}}
	if _, err := x.Encode(); !errors.Is(err, errEntries) {
		t.Errorf("encoded: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	enc, err := sample(f).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(enc)
	f.Add(enc[:headerSize])
	f.Fuzz(func(t *testing.T, in []byte) {
		x, err := Parse(in)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("error of no class: %v", err)
			}
			return
		}
		// What was accepted can be encoded and means the same.
		out, err := x.Encode()
		if err != nil {
			t.Fatal(err)
		}
		y, err := Parse(out)
		if err != nil || !reflect.DeepEqual(x, y) {
			t.Fatalf("second round differs: %v", err)
		}
	})
}

// BenchmarkParse parses the index of 2 GiB.
func BenchmarkParse(b *testing.B) {
	chunks := make([]Chunk, 2<<30/(32*PageSize))
	for i := range chunks {
		chunks[i].Size, chunks[i].Pages = 32*PageSize, 32
	}
	blob, err := NewBlob(digest.FromString("b"), chunks)
	if err != nil {
		b.Fatal(err)
	}
	x := Index{Blobs: []Blob{blob}, Processes: []Process{{PID: 1, Runs: []Run{{Start: 1 << 30, Pages: blob.Pages()}}}}}
	enc, err := x.Encode()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := Parse(enc); err != nil {
			b.Fatal(err)
		}
	}
}
