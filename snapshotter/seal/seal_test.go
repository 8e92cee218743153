// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestChunks(t *testing.T) {
	b, other := NewBlob(NewKey()), NewBlob(NewKey())
	frame := []byte("a frame of a page")
	sealed := b.Seal(nil, frame, 7, 3)
	if len(sealed) != len(frame)+Overhead || bytes.Contains(sealed, frame[:8]) {
		t.Fatalf("sealed: %q", sealed)
	}
	if got, err := b.Open(bytes.Clone(sealed), 7, 3); err != nil || !bytes.Equal(got, frame) {
		t.Fatalf("got %q, %v", got, err)
	}
	flipped := bytes.Clone(sealed)
	flipped[3] ^= 1
	for name, open := range map[string]func() ([]byte, error){
		"another place":   func() ([]byte, error) { return b.Open(bytes.Clone(sealed), 8, 3) },
		"other pages":     func() ([]byte, error) { return b.Open(bytes.Clone(sealed), 7, 4) },
		"another blob":    func() ([]byte, error) { return other.Open(bytes.Clone(sealed), 7, 3) },
		"changed":         func() ([]byte, error) { return b.Open(flipped, 7, 3) },
		"shorter":         func() ([]byte, error) { return b.Open(bytes.Clone(sealed[:len(sealed)-1]), 7, 3) },
		"next to nothing": func() ([]byte, error) { return b.Open([]byte{1}, 7, 3) },
	} {
		if _, err := open(); !errors.Is(err, ErrSealed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if b.CacheKey("x") == other.CacheKey("x") || b.CacheKey("x") == b.CacheKey("y") {
		t.Error("cache keys of different content are the same")
	}
}

// TestNonces: the same content gives another ciphertext at each place, or what is the same in two places would
// show, and what is not could be computed from one another.
func TestNonces(t *testing.T) {
	b := NewBlob(NewKey())
	zeros := make([]byte, 4*segmentSize)
	known := make(map[[64]byte]bool)
	for i := range 300 {
		known[[64]byte(b.Seal(nil, zeros[:64], i, 1))] = true
	}
	for range 2 {
		sealed, err := Bytes(zeros, Key{1}, State)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 4 {
			known[[64]byte(sealed[headerSize+i*(segmentSize+Overhead):])] = true
		}
	}
	if len(known) != 308 {
		t.Errorf("%d different ciphertexts of 308", len(known))
	}
}

func TestStreams(t *testing.T) {
	key := NewKey()
	for _, n := range []int{0, 1, segmentSize - 1, segmentSize, segmentSize + 1, 3*segmentSize + 17} {
		plain := bytes.Repeat([]byte("memory!"), n/7+1)[:n]
		sealed, err := Bytes(plain, key, State)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(sealed, []byte("memory")) {
			t.Errorf("%d bytes: plain text in what was sealed", n)
		}
		if got, err := Open(sealed, key, State); err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%d bytes: %d came back, %v", n, len(got), err)
		}
		again, err := Bytes(plain, key, State)
		if err != nil || bytes.Equal(again[headerSize-saltSize:headerSize], sealed[headerSize-saltSize:headerSize]) {
			t.Errorf("%d bytes: sealed twice with one salt, %v", n, err)
		}
		for name, tc := range map[string]struct {
			change  func([]byte) []byte
			key     Key
			purpose Purpose
		}{
			"another key":     {bytes.Clone, NewKey(), State},
			"another purpose": {bytes.Clone, key, PageIndex},
			"cut by a byte":   {func(p []byte) []byte { return p[:len(p)-1] }, key, State},
			"a byte more":     {func(p []byte) []byte { return append(bytes.Clone(p), 0) }, key, State},
			"another salt":    {func(p []byte) []byte { p = bytes.Clone(p); p[headerSize-1] ^= 1; return p }, key, State},
			"another minor":   {func(p []byte) []byte { p = bytes.Clone(p); p[len(magic)+2] ^= 1; return p }, key, State},
			"a bit":           {func(p []byte) []byte { p = bytes.Clone(p); p[len(p)-Overhead] ^= 1; return p }, key, State},
		} {
			if _, err := Open(tc.change(sealed), tc.key, tc.purpose); !errors.Is(err, ErrSealed) && !(errors.Is(err, ErrFormat) && len(tc.change(sealed)) < headerSize+Overhead) {
				t.Errorf("%d bytes, %s: %v", n, name, err)
			}
		}
	}
}

// TestSegments: segments cannot be dropped, doubled or swapped.
func TestSegments(t *testing.T) {
	key := NewKey()
	sealed, err := Bytes(make([]byte, 3*segmentSize), key, State)
	if err != nil {
		t.Fatal(err)
	}
	const size = segmentSize + Overhead
	head, a, b, c := sealed[:headerSize], sealed[headerSize:][:size], sealed[headerSize+size:][:size], sealed[headerSize+2*size:]
	for name, parts := range map[string][][]byte{
		"swapped": {b, a, c}, "doubled": {a, a, b, c}, "without the last": {a, b}, "without the first": {b, c}, "the last twice": {a, b, c, c},
	} {
		if _, err := Open(bytes.Join(append([][]byte{head}, parts...), nil), key, State); !errors.Is(err, ErrSealed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Open(head, key, State); !errors.Is(err, ErrFormat) {
		t.Errorf("no segment: %v", err)
	}
	sealed[len(magic)] = 9
	if _, err := Open(sealed, key, State); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "version 9") {
		t.Errorf("another version: %v", err)
	}
}

func TestWriterFails(t *testing.T) {
	_, pw := io.Pipe()
	pw.CloseWithError(io.ErrClosedPipe)
	if _, err := NewWriter(pw, NewKey(), State); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
	var out bytes.Buffer
	w, err := NewWriter(&out, NewKey(), State)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Close(), w.Close()); err != nil {
		t.Error(err)
	}
	if _, err := w.Write([]byte{1}); err == nil {
		t.Error("written behind the end")
	}
}

func TestKeys(t *testing.T) {
	blobs := []*Blob{NewBlob(NewKey()), NewBlob(NewKey())}
	joined := JoinKeys(blobs, []byte("index"))
	got, index, err := SplitKeys(joined)
	if err != nil || len(got) != 2 || got[1].Key() != blobs[1].Key() || string(index) != "index" {
		t.Fatalf("got %v, %q, %v", got, index, err)
	}
	for name, p := range map[string][]byte{
		"nothing": nil, "no keys": []byte("THAWPIDX0000"), "cut": joined[:40], "one key twice": JoinKeys([]*Blob{blobs[0], blobs[0]}, nil),
		"too many": append([]byte(keysMagic), 255, 255, 255, 255),
	} {
		if _, _, err := SplitKeys(p); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, verb := range []string{"%v", "%s", "%x", "%#v", "%d"} {
		if s := fmt.Sprintf(verb, blobs[0].Key()); s != "[key]" {
			t.Errorf("%s prints %s", verb, s)
		}
	}
}

func FuzzOpen(f *testing.F) {
	key := Key{1}
	for _, n := range []int{0, 1, segmentSize + 1} {
		p, err := Bytes(make([]byte, n), key, PageIndex)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		got, err := Open(p, key, PageIndex)
		if err != nil && !errors.Is(err, ErrSealed) && !errors.Is(err, ErrFormat) {
			t.Fatalf("error of no class: %v", err)
		}
		if len(got) > len(p) {
			t.Fatalf("%d bytes of %d", len(got), len(p))
		}
	})
}

func FuzzSplitKeys(f *testing.F) {
	f.Add(JoinKeys([]*Blob{NewBlob(Key{1}), NewBlob(Key{2})}, []byte("index")))
	f.Add(JoinKeys(nil, nil))
	f.Fuzz(func(t *testing.T, p []byte) {
		blobs, index, err := SplitKeys(p)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("error of no class: %v", err)
			}
			return
		}
		if got := JoinKeys(blobs, index); !bytes.Equal(got, p) {
			t.Fatalf("%x became %x", p, got)
		}
	})
}
