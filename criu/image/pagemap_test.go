// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func pagemapFile(entries ...[]byte) []byte {
	return encodeRaw(magicPagemap, append([][]byte{entry(7)}, entries...)...)
}

// Only pages that are present take room in the pages file.
func TestPagemapOffsets(t *testing.T) {
	p, err := parsePagemap(pagemapFile(
		entry(0x1000, 2, absent, pagemapPresent),
		entry(0x4000, 3, absent, pagemapLazy),                // left with a page server
		entry(0x8000, 1, absent, pagemapParent),              // in the parent
		entry(0x9000, 1, absent, pagemapPresent|pagemapLazy), // lazy and here
		entry(0xa000, 0, absent, pagemapPresent, 5),          // length of CRIU 4.2
		entry(0x10000, 4, 1),                                 // in the parent, as old CRIU says it
		entry(0x20000, 1),                                    // no flags: present
		entry(0x7f0000000000, 1, absent, pagemapPresent, uint64(1)),
	))
	if err != nil {
		t.Fatal(err)
	}
	if p.PagesID != 7 || p.File() != "pages-7.img" {
		t.Errorf("pages file is %d", p.PagesID)
	}
	want := []Range{
		{0x1000, 2, 0, false, false},
		{0x4000, 3, -1, true, false},
		{0x8000, 1, -1, false, true},
		{0x9000, 1, 2 * PageSize, true, false},
		{0xa000, 5, 3 * PageSize, false, false},
		{0x10000, 4, -1, false, true},
		{0x20000, 1, 8 * PageSize, false, false},
		{0x7f0000000000, 1, 9 * PageSize, false, false},
	}
	if len(p.Ranges) != len(want) {
		t.Fatalf("%d ranges: %+v", len(p.Ranges), p.Ranges)
	}
	for i, r := range p.Ranges {
		if r != want[i] {
			t.Errorf("range %d is %+v, want %+v", i, r, want[i])
		}
	}
	if p.Size != 10*PageSize {
		t.Errorf("size %d", p.Size)
	}
	if err := p.Complete(); err == nil {
		t.Error("incomplete pagemap is called complete")
	}
}

func TestPagemapRefusals(t *testing.T) {
	for name, tc := range map[string]struct {
		in   []byte
		want string
	}{
		"empty":        {nil, "does not begin"},
		"other magic":  {encodeRaw(magicMM), "magic"},
		"no head":      {encodeRaw(magicPagemap), "ends in the middle"},
		"empty head":   {encodeRaw(magicPagemap, nil), "no pages file"},
		"truncated":    {pagemapFile(entry(0x1000, 1))[:15], "ends in the middle"},
		"overlap":      {pagemapFile(entry(0x1000, 2), entry(0x2000, 1)), "overlaps"},
		"order":        {pagemapFile(entry(0x3000, 1), entry(0x2000, 1)), "out of order"},
		"alignment":    {pagemapFile(entry(0x1001, 1)), "1 pages at 0x1001"},
		"no pages":     {pagemapFile(entry(0x1000, 0)), "0 pages"},
		"beyond":       {pagemapFile(entry(maxAddress-PageSize, 2)), "2 pages"},
		"overflow":     {pagemapFile(entry(0x1000, 0, absent, 4, 1<<60)), "pages at"},
		"no address":   {pagemapFile(entry(absent, 1)), "no address"},
		"flags":        {pagemapFile(entry(0x1000, 1, absent, 8)), "unknown flags"},
		"both":         {pagemapFile(entry(0x1000, 1, absent, 5)), "both here and"},
		"field":        {pagemapFile(entry(0x1000, 1, absent, 4, 1, 1)), "unknown field"},
		"huge":         {pagemapFile(entry(0x1000, 1<<32-1), entry(1<<50, 1<<32-1)), "more than"},
		"half varint":  {pagemapFile([]byte{8, 0x80}), "entry 0"},
		"fixed number": {pagemapFile([]byte{9, 0, 0, 0, 0, 0, 0, 0, 0}), "unknown field"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parsePagemap(tc.in)
			if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestPagemapsShareNoFile(t *testing.T) {
	m := pagemapFile(entry(0x1000, 1))
	_, err := dir(t, map[string][]byte{"pagemap-1.img": m, "pagemap-shmem-44.img": m}).Pagemaps()
	if err == nil || !strings.Contains(err.Error(), "both refer to pages-7.img") {
		t.Errorf("error %v", err)
	}
}

// page returns a page of one byte.
func page(b byte) []byte { return bytes.Repeat([]byte{b}, PageSize) }

func TestEagerPagesThereAndBack(t *testing.T) {
	pages := bytes.Join([][]byte{page(1), page(2), page(3), page(4), page(5)}, nil)
	d := dir(t, map[string][]byte{
		"pagemap-1.img": pagemapFile(
			entry(0x1000, 1, absent, 6), entry(0x3000, 2, absent, 4), entry(0x8000, 1, absent, 6), entry(0x9000, 1, absent, 4)),
		"pages-7.img": pages,
	})
	p, err := d.Pagemap(1)
	if err != nil {
		t.Fatal(err)
	}
	f, err := d.OpenPages(p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var compact bytes.Buffer
	if err := p.CompactEager(&compact, f); err != nil {
		t.Fatal(err)
	}
	if want := bytes.Join([][]byte{page(2), page(3), page(5)}, nil); !bytes.Equal(compact.Bytes(), want) || p.EagerSize() != int64(len(want)) || p.LazySize() != 2*PageSize {
		t.Fatalf("compact file of %d bytes, EagerSize %d", compact.Len(), p.EagerSize())
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "pages"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := p.ExpandEager(out, bytes.NewReader(compact.Bytes())); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	if want := bytes.Join([][]byte{page(0), page(2), page(3), page(0), page(5)}, nil); !bytes.Equal(got, want) {
		t.Error("expanded file differs")
	}
	for name, src := range map[string]io.Reader{
		"short": bytes.NewReader(compact.Bytes()[1:]),
		"long":  io.MultiReader(bytes.NewReader(compact.Bytes()), strings.NewReader("x")),
	} {
		if err := p.ExpandEager(out, src); !errors.Is(err, ErrFormat) {
			t.Errorf("%s input: error %v", name, err)
		}
	}
}

func TestPagesFileMustFit(t *testing.T) {
	for name, size := range map[string]int{"short": PageSize - 1, "long": PageSize + 1} {
		d := dir(t, map[string][]byte{"pagemap-1.img": pagemapFile(entry(0x1000, 1)), "pages-7.img": make([]byte, size)})
		p, err := d.Pagemap(1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.OpenPages(p); !errors.Is(err, ErrFormat) {
			t.Errorf("%s file: error %v", name, err)
		}
		if name == "short" {
			f, err := d.Open("pages-7.img")
			if err != nil {
				t.Fatal(err)
			}
			if err := p.CompactEager(io.Discard, f); !errors.Is(err, ErrFormat) {
				t.Errorf("compacting a short file: error %v", err)
			}
			f.Close()
		}
	}
}

func FuzzPagemap(f *testing.F) {
	f.Add(pagemapFile(entry(0x1000, 2, absent, 4), entry(0x8000, 0, absent, 6, 9)))
	f.Add(pagemapFile(entry(0x1000, 2, 1)))
	f.Fuzz(func(t *testing.T, in []byte) {
		p, err := parsePagemap(in)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("error %v is not ErrFormat", err)
			}
			return
		}
		var end uint64
		var size int64
		for _, r := range p.Ranges {
			if r.Start < end || r.End() <= r.Start {
				t.Fatalf("range %+v after %#x", r, end)
			}
			end = r.End()
			if r.Offset >= 0 {
				if r.Offset != size {
					t.Fatalf("range %+v, %d expected", r, size)
				}
				size += int64(r.Pages) * PageSize
			}
		}
		if size != p.Size {
			t.Fatalf("size %d, sum %d", p.Size, size)
		}
	})
}

func parsePagemap(in []byte) (*Pagemap, error) {
	p := &Pagemap{}
	return p, p.parse(in)
}
