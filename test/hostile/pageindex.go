// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"encoding/binary"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// Kinds of runs in the encoding of a page index (docs/image-format.md).
const (
	runZero = 0
	runNext = 1
	runAt   = 2
)

// header is that of a page index.
func header(blobs, processes uint32) []byte {
	out := append([]byte("THAWPIDX"), 1, 0, 0, 0)
	for _, v := range []uint32{pageSize, blobs, processes} {
		out = binary.LittleEndian.AppendUint32(out, v)
	}
	return out
}

// blobRecord is a blob of chunks, each of that size and number of pages.
func blobRecord(id byte, chunks ...[2]uint32) []byte {
	out := bytes.Repeat([]byte{id}, 32)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(chunks)))
	for _, c := range chunks {
		out = append(out, bytes.Repeat([]byte{id}, 32)...)
		out = binary.LittleEndian.AppendUint32(out, c[0])
		out = binary.LittleEndian.AppendUint32(out, c[1])
	}
	return out
}

func numbers(v ...uint64) []byte {
	var out []byte
	for _, n := range v {
		out = binary.AppendUvarint(out, n)
	}
	return out
}

func join(p ...[]byte) []byte { return bytes.Join(p, nil) }

// index is a trick's Make that replaces the page index.
func index(p ...[]byte) func(*Image) {
	return func(i *Image) { i.PageIndex = func([]byte) []byte { return join(p...) } }
}

// changedIndex is one that changes what the index says and encodes it again.
func changedIndex(change func(*pageindex.Index)) func(*Image) {
	return func(i *Image) {
		i.PageIndex = func(p []byte) []byte {
			x, err := pageindex.Parse(p)
			must(err)
			change(x)
			out, err := x.Encode()
			must(err)
			return out
		}
	}
}

// pageIndexTricks lie about where pages are.
func pageIndexTricks() []Trick {
	one := blobRecord(1, [2]uint32{100, 2})
	process := func(v ...uint64) []byte { return numbers(v...) }
	bytesAt := func(at int, p ...byte) func(*Image) {
		return func(i *Image) {
			i.PageIndex = func(in []byte) []byte {
				copy(in[at:], p)
				return in
			}
		}
	}
	return []Trick{
		{Name: "no-page-index", Make: index([]byte("something else")), Says: "not a page index"},
		{Name: "index-version", Make: bytesAt(8, 2), Says: "page index: format version 2 is not supported"},
		{Name: "index-page-size", Make: bytesAt(13, 0x40), Says: "invalid page index: page size 16384"},
		{Name: "index-too-long", Make: func(i *Image) { i.PageIndex = func(p []byte) []byte { return append(p, 0) } }, Says: "invalid page index: 1 bytes behind its end"},
		{Name: "index-too-short", Make: func(i *Image) { i.PageIndex = func(p []byte) []byte { return p[:len(p)-1] } }, Says: "invalid page index: it ends too early"},
		{Name: "many-blobs", Make: index(header(1<<32-1, 0)), Says: "more than 32768 page blobs"},
		{Name: "many-processes", Make: index(header(0, 1<<32-1)), Says: "more than 4194304 runs and processes"},
		{Name: "many-chunks", Make: index(header(1, 0), bytes.Repeat([]byte{1}, 32), []byte{0xff, 0xff, 0xff, 0xff}), Says: "blob 0: invalid page index: it ends too early"},
		{Name: "many-runs", Make: index(header(0, 1), process(1, 1<<40)), Says: "number 1099511627776 where at most"},
		{Name: "runs-in-millions", Make: index(header(0, 1), process(1, 5<<20), bytes.Repeat([]byte{0, 1<<2 | runZero}, 5<<20)), Says: "process 0: invalid page index: more than 4194304"},
		{Name: "endless-number", Make: index(header(0, 1), bytes.Repeat([]byte{0xff}, 20)), Says: "process 0: invalid page index: it ends too early"},
		{Name: "chunk-of-no-pages", Make: index(header(1, 0), blobRecord(1, [2]uint32{100, 0})), Says: "has 0 pages, allowed are 1 to 1024"},
		{Name: "chunk-of-many-pages", Make: index(header(1, 0), blobRecord(1, [2]uint32{100, 1<<32 - 1})), Says: "has 4294967295 pages, allowed are 1 to 1024"},
		{Name: "chunk-of-no-bytes", Make: index(header(1, 0), blobRecord(1, [2]uint32{0, 1})), Says: "is 0 bytes for 1 pages"},
		{Name: "chunk-larger-than-its-pages", Make: index(header(1, 0), blobRecord(1, [2]uint32{1 << 30, 1})), Says: "is 1073741824 bytes for 1 pages"},
		{Name: "blob-of-no-chunks", Make: index(header(1, 0), blobRecord(1)), Says: "has no chunks"},
		{Name: "blob-twice", Make: index(header(2, 0), one, one), Says: "is in it twice"},
		{Name: "run-of-no-pages", Make: index(header(1, 1), one, process(1, 1, 0, runZero)), Says: "run at 0x0 is empty"},
		{Name: "run-out-of-the-address-space", Make: index(header(0, 1), process(1, 1, 1<<43, (1<<44)<<2|runZero)), Says: "leaves the address space"},
		{Name: "run-of-no-blob", Make: index(header(1, 1), one, process(1, 1, 0, 1<<2|runAt, 7, 0)), Says: "refers to blob 7 of 1"},
		{Name: "run-of-no-page", Make: index(header(1, 1), one, process(1, 1, 0, 1<<2|runAt, 0, 2)), Says: "refers to pages 2+1 of blob 0, which has 2"},
		{Name: "run-over-the-blob", Make: index(header(1, 1), one, process(1, 1, 0, 3<<2|runAt, 0, 0)), Says: "refers to pages 0+3 of blob 0, which has 2"},
		{Name: "run-behind-nothing", Make: index(header(1, 1), one, process(1, 1, 0, 1<<2|runNext)), Says: "first stored run of process 1 has no place"},
		{Name: "run-of-unknown-kind", Make: index(header(0, 1), process(1, 1, 0, 1<<2|3)), Says: "unknown kind of run in process 1"},
		{Name: "process-twice", Make: index(header(0, 2), process(1, 0), process(1, 0)), Says: "process 1 after process 1"},
		{Name: "process-of-a-huge-number", Make: index(header(0, 1), process(1<<40, 0)), Says: "number 1099511627776 where at most 2147483647"},
		{Name: "memory-of-the-whole-world", Make: changedIndex(func(x *pageindex.Index) {
			for pid := range uint32(3) {
				x.Processes = append(x.Processes, pageindex.Process{PID: 1000 + pid, Runs: []pageindex.Run{{Pages: 1 << 44, Blob: pageindex.Zero}}})
			}
		}), Says: "limits.max_memory allows"},
		{Name: "blob-that-is-no-layer", Make: index(header(1, 0), one), Says: "page index refers to sha256:0101010101"},
		{Name: "layer-that-is-no-blob", Make: index(header(0, 0)), Says: "page blobs, the page index 0"},
		{Name: "page-missing", Make: changedIndex(func(x *pageindex.Index) { x.Processes[0].Runs = x.Processes[0].Runs[1:] }), Says: "contradict each other about the pages"},
		{Name: "page-nobody-dumped", Make: changedIndex(func(x *pageindex.Index) {
			r := &x.Processes[0].Runs
			*r = append(*r, pageindex.Run{Start: 1 << 50, Pages: 1, Blob: pageindex.Zero})
		}), Says: "of process 1 contradict each other about the pages from 0x4000000000000"},
		{Name: "process-nobody-dumped", Make: changedIndex(func(x *pageindex.Index) { x.Processes = append(x.Processes, pageindex.Process{PID: 999}) }), Says: "process 999, of which there is no pagemap"},
		{Name: "index-other-than-its-digest", Make: func(i *Image) {
			bytesAt(10, 1)(i) // the minor version, so that no cache has it
			i.Tampered[kindPageIndex] = func(p []byte) []byte { p[len(p)-1] ^= 1; return p }
		}, Says: "sha256:"},
	}
}
