// SPDX-License-Identifier: Apache-2.0

package pageblob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageindex"
)

const pageSize = pageindex.PageSize

// memory makes n different pages, half of each incompressible.
func memory(n int, seed uint64) []byte {
	rnd := rand.New(rand.NewPCG(seed, 1))
	out := make([]byte, n*pageSize)
	for i := 0; i < len(out); i += pageSize {
		for k := 0; k < pageSize/2; k++ {
			out[i+k] = byte(rnd.Uint32())
		}
		out[i+pageSize-1] = 1
	}
	return out
}

func chunkOf(t testing.TB, content []byte) (pageindex.Chunk, []byte) {
	t.Helper()
	frame, err := Encode(nil, content)
	if err != nil {
		t.Fatal(err)
	}
	return pageindex.Chunk{SHA256: sha256.Sum256(frame), Size: uint32(len(frame)), Pages: uint32(len(content) / pageSize)}, frame
}

func TestEncodeDecode(t *testing.T) {
	for _, n := range []int{1, 2, 31, 32, 33, 1024} {
		content := memory(n, uint64(n))
		c, frame := chunkOf(t, content)
		if int64(c.Size) > pageindex.MaxFrameSize(c.Pages) {
			t.Errorf("%d pages: frame of %d bytes is over the limit", n, c.Size)
		}
		got := make([]byte, len(content))
		if err := Decode(got, c, frame); err != nil {
			t.Errorf("%d pages: %v", n, err)
		} else if !bytes.Equal(got, content) {
			t.Errorf("%d pages: content differs", n)
		}
	}
	for _, n := range []int{0, 1, pageSize - 1, pageSize + 1, 1025 * pageSize} {
		if _, err := Encode(nil, make([]byte, n)); err == nil {
			t.Errorf("a chunk was made of %d bytes", n)
		}
	}
}

// Chunks are found again by the digest of their frames, so the encoder must not
// let what it did before show.
func TestEncodeIsDeterministic(t *testing.T) {
	content := memory(32, 7)
	_, first := chunkOf(t, content)
	for i := range 50 {
		chunkOf(t, memory(1+i%32, uint64(i)))
		if _, again := chunkOf(t, content); !bytes.Equal(first, again) {
			t.Fatalf("frame %d differs", i)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	content := memory(4, 1)
	c, frame := chunkOf(t, content)
	dst := make([]byte, len(content))
	bad := bytes.Clone(frame)
	bad[len(bad)/2] ^= 1
	long := append(bytes.Clone(frame), frame...)
	short, _ := Encode(nil, content[:3*pageSize])
	describe := func(p []byte, pages uint32) pageindex.Chunk {
		return pageindex.Chunk{SHA256: sha256.Sum256(p), Size: uint32(len(p)), Pages: pages}
	}
	for name, tc := range map[string]struct {
		dst   []byte
		c     pageindex.Chunk
		frame []byte
	}{
		"bit flipped":             {dst, c, bad},
		"cut short":               {dst, c, frame[:len(frame)-1]},
		"nothing":                 {dst, c, nil},
		"one byte more":           {dst, c, append(bytes.Clone(frame), 0)},
		"no room":                 {dst[:pageSize], c, frame},
		"too much room":           {make([]byte, 5*pageSize), c, frame},
		"too many pages promised": {make([]byte, 5*pageSize), describe(frame, 5), frame},
		"more than promised":      {dst, describe(long, 4), long},
		"less than promised":      {dst, describe(short, 4), short},
		"no zstd":                 {dst, describe(content, 4), content},
		"no pages":                {nil, describe(frame, 0), frame},
		"too large a chunk":       {make([]byte, 2000*pageSize), describe(frame, 2000), frame},
	} {
		if err := Decode(tc.dst, tc.c, tc.frame); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecompress(f *testing.F) {
	_, frame := chunkOf(f, memory(2, 1))
	f.Add(frame, uint8(2))
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0xff, 0xff, 0xff, 0x7f}, uint8(1))
	f.Fuzz(func(t *testing.T, frame []byte, pages uint8) {
		buf := make([]byte, (int(pages)+1)*pageSize)
		dst := buf[:int(pages)*pageSize]
		err := decompress(dst, frame)
		if err != nil && !errors.Is(err, ErrDamaged) {
			t.Fatal(err)
		}
		if !bytes.Equal(buf[len(dst):], zeroPage[:]) {
			t.Fatal("written beyond the end")
		}
	})
}

// store is a registry that keeps blobs in memory.
type store struct {
	blobs map[digest.Digest][]byte
	order []digest.Digest
	open  int
	fail  error // of the next Write
}

type storeSink struct {
	s   *store
	buf bytes.Buffer
}

func (s *store) Open() (Sink, error) { s.open++; return &storeSink{s: s}, nil }

func (k *storeSink) Write(p []byte) (int, error) {
	if k.s.fail != nil {
		return 0, k.s.fail
	}
	return k.buf.Write(p)
}

func (k *storeSink) Commit(d digest.Digest, size int64) error {
	if got := digest.FromBytes(k.buf.Bytes()); got != d || int64(k.buf.Len()) != size {
		return fmt.Errorf("committed as %s (%d), is %s (%d)", d, size, got, k.buf.Len())
	}
	k.s.open--
	if k.s.blobs == nil {
		k.s.blobs = map[digest.Digest][]byte{}
	}
	k.s.blobs[d] = k.buf.Bytes()
	k.s.order = append(k.s.order, d)
	return nil
}

func (k *storeSink) Abort(error) { k.s.open-- }

// vma is memory at an address.
type vma struct {
	addr uint64
	data []byte
}

// write puts processes (PIDs 1, 2, ...) through a writer and the index through
// its encoding.
func write(t testing.TB, s *store, opts Options, processes ...[]vma) (*pageindex.Index, Stats) {
	t.Helper()
	opts.Open = s.Open
	w := NewWriter(context.Background(), opts)
	for i, vmas := range processes {
		if err := w.Begin(uint32(i + 1)); err != nil {
			t.Fatal(err)
		}
		for _, v := range vmas {
			if err := w.Add(v.addr, v.data); err != nil {
				t.Fatal(err)
			}
		}
	}
	x, fresh, stats, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	if s.open != 0 {
		t.Fatalf("%d sinks left open", s.open)
	}
	if fresh > len(x.Blobs) {
		t.Fatalf("%d of %d blobs are new", fresh, len(x.Blobs))
	}
	p, err := x.Encode()
	if err != nil {
		t.Fatal(err)
	}
	x, err = pageindex.Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	check(t, s, x, processes)
	return x, stats
}

// check reads every page back through the index.
func check(t testing.TB, s *store, x *pageindex.Index, processes [][]vma) {
	t.Helper()
	content := make([][]byte, len(x.Blobs))
	for i := range x.Blobs {
		b := &x.Blobs[i]
		for k, c := range b.Chunks {
			page := make([]byte, int(c.Pages)*pageSize)
			if err := Decode(page, c, s.blobs[b.Digest][b.Offset(k):b.Offset(k+1)]); err != nil {
				t.Fatal(err)
			}
			content[i] = append(content[i], page...)
		}
		// The blob as a whole is a zstd stream too.
		zr, err := zstd.NewReader(bytes.NewReader(s.blobs[b.Digest]))
		if err != nil {
			t.Fatal(err)
		}
		whole, err := io.ReadAll(zr)
		zr.Close()
		if err != nil || !bytes.Equal(whole, content[i]) {
			t.Fatalf("blob %d is no zstd stream of its pages: %v", i, err)
		}
	}
	for i, vmas := range processes {
		p, ok := x.Process(uint32(i + 1))
		if !ok {
			t.Fatalf("process %d is missing", i+1)
		}
		got := map[uint64][]byte{}
		for _, r := range p.Runs {
			for n := range r.Pages {
				page := zeroPage[:]
				if r.Blob != pageindex.Zero {
					page = content[r.Blob][(r.Page+n)*pageSize:][:pageSize]
				}
				got[r.Start+n*pageSize] = page
			}
		}
		total := 0
		for _, v := range vmas {
			for off := 0; off < len(v.data); off += pageSize {
				total++
				if !bytes.Equal(got[v.addr+uint64(off)], v.data[off:off+pageSize]) {
					t.Fatalf("process %d: page at %#x differs", i+1, v.addr+uint64(off))
				}
			}
		}
		if total != len(got) {
			t.Fatalf("process %d: %d pages in the index, %d were given", i+1, len(got), total)
		}
	}
}

func TestWriterRoundTrip(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for round := range 30 {
		var processes [][]vma
		for range 1 + rnd.IntN(3) {
			var vmas []vma
			addr := uint64(0x10000)
			for range rnd.IntN(40) {
				n := 1 + rnd.IntN(70)
				data := memory(n, rnd.Uint64())
				for i := range n {
					if rnd.IntN(4) == 0 {
						clear(data[i*pageSize:][:pageSize])
					}
				}
				vmas = append(vmas, vma{addr, data})
				addr += uint64(n+rnd.IntN(40)) * pageSize
			}
			processes = append(processes, vmas)
		}
		var s store
		x, _ := write(t, &s, Options{MaxBlob: 100 << 10}, processes...)
		for _, b := range x.Blobs {
			for i, c := range b.Chunks {
				if c.Pages > ChunkPages {
					t.Fatalf("round %d: chunk %d has %d pages", round, i, c.Pages)
				}
			}
		}
	}
}

func TestZeroPagesCostNothing(t *testing.T) {
	var s store
	x, stats := write(t, &s, Options{}, []vma{{0x1000, make([]byte, 1000*pageSize)}})
	if len(s.blobs) != 0 || len(x.Blobs) != 0 || stats.Zero != 1000*pageSize || stats.Pages != stats.Zero {
		t.Errorf("%d blobs, stats %+v", len(s.blobs), stats)
	}
	if n := len(x.Processes[0].Runs); n != 1 {
		t.Errorf("%d runs", n)
	}
}

// A child after fork has the same pages as its parent.
func TestRepeatedChunksAreWrittenOnce(t *testing.T) {
	data := memory(320, 1)
	var s store
	x, stats := write(t, &s, Options{}, []vma{{0x100000, data}}, []vma{{0x100000, data}})
	if stats.Repeated != int64(len(data)) || x.Blobs[0].Pages() != 320 {
		t.Errorf("stats %+v, %d pages written", stats, x.Blobs[0].Pages())
	}
}

// The second generation writes what changed only.
func TestKnownChunksAreReused(t *testing.T) {
	var s store
	base := memory(640, 1)
	first, _ := write(t, &s, Options{}, []vma{{0x40000000, base}})
	var known Known
	known.Add(first.Blobs[0])
	known.Add(first.Blobs[0])

	// One page changed, and pages at odd places inserted before.
	changed := bytes.Clone(base)
	changed[100*pageSize]++
	x, stats := write(t, &s, Options{Known: &known}, []vma{{0x3fff3000, memory(5, 9)}, {0x40000000, changed}})
	if got, want := stats.Reused, int64(640-2*ChunkPages)*pageSize; got < want {
		t.Errorf("%d pages reused, want at least %d", got/pageSize, want/pageSize)
	}
	if len(x.Blobs) != 2 || x.Blobs[1].Digest != first.Blobs[0].Digest || len(x.Blobs[1].Chunks) != len(first.Blobs[0].Chunks) {
		t.Errorf("the index does not refer to the old blob as a whole")
	}

	// Nothing changed: nothing is written.
	n := len(s.blobs)
	x, stats = write(t, &s, Options{Known: &known}, []vma{{0x40000000, base}})
	if len(s.blobs) != n || stats.Compressed != 0 || len(x.Blobs) != 1 {
		t.Errorf("unchanged memory was written again: %+v", stats)
	}
}

// Memory that begins at an odd address falls into aligned chunks soon.
func TestChunksAlign(t *testing.T) {
	var s store
	x, _ := write(t, &s, Options{}, []vma{{0x40000000 + 20*pageSize, memory(12+5*32+3, 1)}})
	var got []uint32
	for _, c := range x.Blobs[0].Chunks {
		got = append(got, c.Pages)
	}
	if want := []uint32{12, 32, 32, 32, 32, 32, 3}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("chunks of %v pages, want %v", got, want)
	}
}

func TestBlobsAreSplit(t *testing.T) {
	var s store
	x, _ := write(t, &s, Options{MaxBlob: 256 << 10}, []vma{{0x40000000, memory(640, 1)}})
	if len(x.Blobs) < 4 {
		t.Fatalf("%d blobs", len(x.Blobs))
	}
	for i := range x.Blobs {
		if n := x.Blobs[i].Size(); n > 256<<10+pageindex.MaxFrameSize(ChunkPages) {
			t.Errorf("blob %d has %d bytes", i, n)
		}
		if s.order[i] != x.Blobs[i].Digest {
			t.Errorf("blob %d is not in the order of opening", i)
		}
	}
}

func TestWriterFails(t *testing.T) {
	s := store{fail: errors.New("disk on fire")}
	w := NewWriter(context.Background(), Options{Open: s.Open})
	if err := w.Begin(1); err != nil {
		t.Fatal(err)
	}
	var err error
	for i := 0; err == nil && i < 10000; i++ {
		err = w.Add(uint64(i)*32*pageSize, memory(32, uint64(i)))
	}
	if !errors.Is(err, s.fail) {
		t.Errorf("Add: %v", err)
	}
	if _, _, _, err := w.Close(); !errors.Is(err, s.fail) {
		t.Errorf("Close: %v", err)
	}
	if s.open != 0 {
		t.Error("sink left open")
	}
	if err := w.Add(0, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Add after Close: %v", err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	s = store{}
	w = NewWriter(ctx, Options{Open: s.Open})
	cancel()
	if _, _, _, err := w.Close(); !errors.Is(err, context.Canceled) {
		t.Errorf("Close after cancel: %v", err)
	}

	s = store{}
	w = NewWriter(context.Background(), Options{Open: s.Open})
	if err := w.Add(0x1000, memory(1, 1)); err == nil {
		t.Error("pages without process were taken")
	}
	if err := w.Begin(2); err != nil {
		t.Error(err)
	}
	if err := w.Begin(2); err == nil {
		t.Error("the same process twice was taken")
	}
	for _, bad := range []vma{{0x1001, memory(1, 1)}, {0x1000, make([]byte, 5)}} {
		if err := w.Add(bad.addr, bad.data); err == nil {
			t.Errorf("%d bytes at %#x were taken", len(bad.data), bad.addr)
		}
	}
	if err := w.Add(0x2000, memory(40, 1)); err != nil {
		t.Error(err)
	}
	if err := w.Add(0x3000, memory(1, 1)); err == nil {
		t.Error("overlapping pages were taken")
	}
	w.Abort(errors.New("enough"))
	w.Abort(nil)
	if s.open != 0 {
		t.Error("sink left open by Abort")
	}
}

// BenchmarkEncode compresses a memory image: set THAW_BENCH_PAGES to a
// pages-*.img that CRIU wrote.
func BenchmarkEncode(b *testing.B) {
	data := memory(2048, 1)
	if name := os.Getenv("THAW_BENCH_PAGES"); name != "" {
		p, err := os.ReadFile(name)
		if err != nil {
			b.Fatal(err)
		}
		data = p[:len(p)/pageSize*pageSize]
	}
	for _, l := range []zstd.EncoderLevel{zstd.SpeedFastest, zstd.SpeedDefault, zstd.SpeedBetterCompression, zstd.SpeedBestCompression} {
		b.Run(l.String(), func(b *testing.B) {
			enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(l), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(ChunkPages*pageSize), zstd.WithEncoderCRC(false))
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(data)))
			out := 0
			var buf []byte
			for b.Loop() {
				out = 0
				for i := 0; i < len(data); i += ChunkPages * pageSize {
					buf = enc.EncodeAll(data[i:min(i+ChunkPages*pageSize, len(data))], buf[:0])
					out += len(buf)
				}
			}
			b.ReportMetric(float64(len(data))/float64(out), "ratio")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	c, frame := chunkOf(b, memory(ChunkPages, 1))
	dst := make([]byte, ChunkPages*pageSize)
	b.SetBytes(int64(len(dst)))
	for b.Loop() {
		if err := Decode(dst, c, frame); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkWriter(b *testing.B) {
	data := memory(16384, 1)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		var s store
		w := NewWriter(context.Background(), Options{Open: s.Open})
		if err := w.Begin(1); err != nil {
			b.Fatal(err)
		}
		if err := w.Add(0x10000000, data); err != nil {
			b.Fatal(err)
		}
		if _, _, _, err := w.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
