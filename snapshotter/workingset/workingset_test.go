// SPDX-License-Identifier: Apache-2.0

package workingset

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
)

func sample() *Set {
	return &Set{
		Checkpoint: digest.FromString("checkpoint"),
		Chunks:     []Chunk{{0, 7}, {0, 8}, {0, 9}, {1, 0}, {0, 3}, {0, 2}, {2, 1<<32 - 1}},
	}
}

func TestEncode(t *testing.T) {
	for _, partial := range []bool{false, true} {
		s := sample()
		s.Partial = partial
		p, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse(p)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, s) {
			t.Errorf("%+v became %+v", s, got)
		}
	}
}

// TestEncodeBounded: the largest set of the worst form can be read again, and what is more is left out.
func TestEncodeBounded(t *testing.T) {
	s := &Set{Checkpoint: digest.FromString("checkpoint")}
	for i := range uint32(MaxChunks + 10) {
		s.Chunks = append(s.Chunks, Chunk{1<<32 - 1 - i, 1<<32 - 1 - 2*i})
	}
	p, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got.Chunks, s.Chunks[:MaxChunks]) {
		t.Errorf("%d chunks became %d", len(s.Chunks), len(got.Chunks))
	}
	s.Checkpoint = "sha256:short"
	if _, err := s.Encode(); !errors.Is(err, ErrFormat) {
		t.Errorf("a set of no checkpoint: %v", err)
	}
}

func TestParseRefuses(t *testing.T) {
	good, err := sample().Encode()
	if err != nil {
		t.Fatal(err)
	}
	head := bytes.Clone(good[:headerSize])
	runs := func(n byte, body ...byte) []byte {
		p := append(bytes.Clone(head), body...)
		copy(p[headerSize-4:], []byte{n, 0, 0, 0})
		return p
	}
	version := bytes.Clone(good)
	version[8] = 2
	for name, p := range map[string][]byte{
		"empty":              nil,
		"other magic":        append([]byte("THAWPIDX"), good[8:]...),
		"other version":      version,
		"cut short":          good[:len(good)-1],
		"longer":             append(bytes.Clone(good), 0),
		"empty run":          runs(1, 0, 0, 0),
		"too many chunks":    runs(1, 0, 0, 0x81, 0x40),
		"too many in all":    runs(2, 0, 0, 0x80, 0x40, 0, 0, 1),
		"too many runs":      append(bytes.Clone(head[:headerSize-4]), 0xff, 0xff, 0xff, 0xff),
		"leaves 32 bits":     runs(1, 0, 0xff, 0xff, 0xff, 0xff, 0x0f, 2),
		"blob of 33 bits":    runs(1, 0x80, 0x80, 0x80, 0x80, 0x10, 0, 1),
		"number without end": runs(1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80),
		"oversized":          append(bytes.Clone(good), make([]byte, MaxEncodedSize)...),
	} {
		if _, err := Parse(p); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWithin(t *testing.T) {
	x := &pageindex.Index{Blobs: []pageindex.Blob{{Chunks: make([]pageindex.Chunk, 9)}, {Chunks: make([]pageindex.Chunk, 1)}}}
	s := sample()
	s.Chunks = append(s.Chunks, Chunk{0, 7})
	want := []Chunk{{0, 7}, {0, 8}, {1, 0}, {0, 3}, {0, 2}}
	if got := s.Within(x); !reflect.DeepEqual(got, want) {
		t.Errorf("%v instead of %v", got, want)
	}
}

func FuzzParse(f *testing.F) {
	good, err := sample().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(strings.Repeat(magic, 8)))
	f.Fuzz(func(t *testing.T, p []byte) {
		s, err := Parse(p)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		if len(s.Chunks) > MaxChunks {
			t.Fatalf("%d chunks", len(s.Chunks))
		}
		again, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if same, err := Parse(again); err != nil || !reflect.DeepEqual(s, same) {
			t.Fatalf("%+v became %+v: %v", s, same, err)
		}
	})
}

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "sets")
	open := func() *Store {
		t.Helper()
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	set := sample()
	put := func(partial bool, chunks ...Chunk) {
		t.Helper()
		if err := s.Put(&Set{Checkpoint: set.Checkpoint, Partial: partial, Chunks: chunks}); err != nil {
			t.Fatal(err)
		}
	}
	has := func(what string, want ...Chunk) {
		t.Helper()
		got, err := s.Get(set.Checkpoint)
		if err != nil || !reflect.DeepEqual(got.Chunks, want) {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	if _, err := s.Get(set.Checkpoint); !errdefs.IsNotFound(err) {
		t.Errorf("empty store: %v", err)
	}
	put(true, Chunk{0, 1})
	has("first", Chunk{0, 1})
	put(true, Chunk{0, 2})
	has("partial replaces partial", Chunk{0, 2})
	put(false, Chunk{0, 3})
	has("whole replaces partial", Chunk{0, 3})
	put(true, Chunk{0, 4}, Chunk{0, 5})
	has("partial does not replace whole", Chunk{0, 3})
	put(false)
	has("nothing replaces nothing", Chunk{0, 3})
	put(false, Chunk{0, 6})
	has("whole replaces whole", Chunk{0, 6})

	// What a killed run left is cleaned, what it had finished is kept.
	if err := os.WriteFile(filepath.Join(dir, tmpPrefix+"1"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = open()
	has("after a restart", Chunk{0, 6})
	if _, err := os.Stat(filepath.Join(dir, tmpPrefix+"1")); !errors.Is(err, os.ErrNotExist) {
		t.Error("a half-made file is left")
	}

	// A damaged set, or one of something else, is none.
	path := filepath.Join(dir, set.Checkpoint.Encoded())
	other := sample()
	other.Checkpoint = digest.FromString("other")
	p, err := other.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, content := range [][]byte{nil, []byte("garbage"), p, make([]byte, MaxEncodedSize+1)} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get(set.Checkpoint); !errdefs.IsNotFound(err) {
			t.Errorf("a damaged set of %d bytes: %v", len(content), err)
		}
	}
	if _, err := s.Get("../../etc/passwd"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("no digest: %v", err)
	}
}

func TestStoreBounded(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s.kept = 2
	names := []digest.Digest{digest.FromString("a"), digest.FromString("b"), digest.FromString("c")}
	for i, d := range names[:2] {
		if err := s.Put(&Set{Checkpoint: d, Chunks: []Chunk{{0, 1}}}); err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(filepath.Join(s.dir, d.Encoded()), when, when); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Get(names[0]); err != nil { // used: the other one is older now
		t.Fatal(err)
	}
	if err := s.Put(&Set{Checkpoint: names[2], Chunks: []Chunk{{0, 1}}}); err != nil {
		t.Fatal(err)
	}
	for i, kept := range []bool{true, false, true} {
		if _, err := s.Get(names[i]); (err == nil) != kept {
			t.Errorf("set %d: %v", i, err)
		}
	}
}
