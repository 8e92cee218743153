// SPDX-License-Identifier: Apache-2.0

package pageindex

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/opencontainers/go-digest"
)

// The encoding (docs/image-format.md, "Page index"):
//
//	header     magic "THAWPIDX", u16 major, u16 minor, u32 page size,
//	           u32 blobs, u32 processes
//	blobs      for each: 32 bytes SHA-256 of the blob, u32 chunks,
//	           then for each chunk: 32 bytes SHA-256, u32 size, u32 pages
//	processes  for each: uvarint pid, uvarint runs, then for each run:
//	           uvarint gap in pages to the end of the run before,
//	           uvarint pages<<2 | kind, and for kind `at` uvarint blob, uvarint page
//
// Fixed-size numbers are little-endian; uvarint is LEB128.
const (
	magic      = "THAWPIDX"
	headerSize = len(magic) + 2 + 2 + 4 + 4 + 4
	blobRecord = sha256.Size + 4

	kindZero = 0 // all zero
	kindNext = 1 // stored, directly behind the pages of the stored run before
	kindAt   = 2 // stored, at the blob and page that follow
)

// Encode returns the index in its binary form. It fails if the index
// contradicts itself.
func (x *Index) Encode() ([]byte, error) {
	if err := x.validate(); err != nil {
		return nil, err
	}
	out := make([]byte, 0, 4096)
	out = append(out, magic...)
	out = binary.LittleEndian.AppendUint16(out, Major)
	out = binary.LittleEndian.AppendUint16(out, 0)
	out = binary.LittleEndian.AppendUint32(out, PageSize)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(x.Blobs)))
	out = binary.LittleEndian.AppendUint32(out, uint32(len(x.Processes)))
	for i := range x.Blobs {
		b := &x.Blobs[i]
		sum, err := hex.DecodeString(b.Digest.Encoded())
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		out = append(out, sum...)
		out = binary.LittleEndian.AppendUint32(out, uint32(len(b.Chunks)))
		out = append(out, recordsOf(b.Chunks)...)
	}
	for i := range x.Processes {
		p := &x.Processes[i]
		out = binary.AppendUvarint(out, uint64(p.PID))
		out = binary.AppendUvarint(out, uint64(len(p.Runs)))
		var c cursor
		for _, r := range p.Runs {
			kind := c.kind(r)
			out = binary.AppendUvarint(out, (r.Start-c.end)/PageSize)
			out = binary.AppendUvarint(out, r.Pages<<2|kind)
			if kind == kindAt {
				out = binary.AppendUvarint(out, uint64(r.Blob))
				out = binary.AppendUvarint(out, r.Page)
			}
			c.advance(r)
		}
	}
	if len(out) > MaxEncodedSize {
		return nil, fmt.Errorf("page index of %d bytes is over the limit of %d", len(out), MaxEncodedSize)
	}
	return out, nil
}

// cursor is what a run's encoding is relative to.
type cursor struct {
	end  uint64 // virtual address behind the run before
	blob int    // where the next page of the last stored run would be
	page uint64
	data bool // a stored run came before
}

func (c *cursor) kind(r Run) uint64 {
	switch {
	case r.Blob == Zero:
		return kindZero
	case c.data && r.Blob == c.blob && r.Page == c.page:
		return kindNext
	}
	return kindAt
}

func (c *cursor) advance(r Run) {
	c.end = r.End()
	if r.Blob != Zero {
		c.blob, c.page, c.data = r.Blob, r.Page+r.Pages, true
	}
}

// Parse decodes and checks an index. What it returns keeps every promise of the
// types' comments: no run overlaps another, leaves the address space or refers
// to a page that no chunk holds. The input may be hostile: memory is taken only
// in proportion to the input's length. The chunks of what it returns may lie in the input,
// which must not be changed any more. Errors wrap ErrFormat.
func Parse(in []byte) (*Index, error) {
	if len(in) > MaxEncodedSize {
		return nil, fmt.Errorf("%w: %d bytes are over the limit of %d", ErrFormat, len(in), MaxEncodedSize)
	}
	if len(in) < headerSize || string(in[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: not a page index", ErrFormat)
	}
	h := in[len(magic):]
	if v := binary.LittleEndian.Uint16(h); v != Major {
		return nil, fmt.Errorf("%w: format version %d is not supported (this thaw reads version %d): use a thaw that knows it", ErrFormat, v, Major)
	}
	if n := binary.LittleEndian.Uint32(h[4:]); n != PageSize {
		return nil, fmt.Errorf("%w: page size %d, this node has %d", ErrFormat, n, PageSize)
	}
	blobs, processes := binary.LittleEndian.Uint32(h[8:]), binary.LittleEndian.Uint32(h[12:])
	if blobs > maxBlobs {
		return nil, errBlobs
	}
	if processes > maxEntries {
		return nil, errEntries
	}
	d := decoder{in: in[headerSize:], runs: maxEntries - int(processes)}
	x := &Index{}
	for i := range blobs {
		b, err := d.blob()
		if err != nil {
			return nil, fmt.Errorf("blob %d: %w", i, err)
		}
		x.Blobs = append(x.Blobs, b)
	}
	for i := range processes {
		p, err := d.process()
		if err != nil {
			return nil, fmt.Errorf("process %d: %w", i, err)
		}
		x.Processes = append(x.Processes, p)
	}
	if len(d.in) != 0 {
		return nil, fmt.Errorf("%w: %d bytes behind its end", ErrFormat, len(d.in))
	}
	if err := x.validate(); err != nil {
		return nil, err
	}
	return x, nil
}

// decoder consumes its input from the front.
type decoder struct {
	in   []byte
	runs int // how many may still come
}

var errShort = fmt.Errorf("%w: it ends too early", ErrFormat)

func (d *decoder) take(n int) ([]byte, error) {
	if len(d.in) < n {
		return nil, errShort
	}
	p := d.in[:n]
	d.in = d.in[n:]
	return p, nil
}

func (d *decoder) uvarint(max uint64) (uint64, error) {
	v, n := binary.Uvarint(d.in)
	if n <= 0 {
		return 0, errShort
	}
	if v > max {
		return 0, fmt.Errorf("%w: number %d where at most %d is possible", ErrFormat, v, max)
	}
	d.in = d.in[n:]
	return v, nil
}

func (d *decoder) blob() (Blob, error) {
	p, err := d.take(blobRecord)
	if err != nil {
		return Blob{}, err
	}
	sum := digest.NewDigestFromBytes(digest.SHA256, p[:sha256.Size])
	n := uint64(binary.LittleEndian.Uint32(p[sha256.Size:]))
	if n > uint64(len(d.in)/chunkRecord) {
		return Blob{}, errShort
	}
	records, err := d.take(int(n) * chunkRecord)
	if err != nil {
		return Blob{}, err
	}
	return NewBlob(sum, chunksOf(records))
}

func (d *decoder) process() (Process, error) {
	const maxPages = maxAddress / PageSize
	pid, err := d.uvarint(1<<31 - 1)
	if err != nil {
		return Process{}, err
	}
	n, err := d.uvarint(uint64(len(d.in) / 2)) // a run takes two bytes at least
	if err != nil {
		return Process{}, err
	}
	if n > uint64(d.runs) {
		return Process{}, errEntries
	}
	d.runs -= int(n)
	p := Process{PID: uint32(pid)}
	if n > 0 {
		p.Runs = make([]Run, 0, n)
	}
	var c cursor
	for range n {
		gap, err := d.uvarint(maxPages)
		if err != nil {
			return Process{}, err
		}
		v, err := d.uvarint(maxPages<<2 | 3)
		if err != nil {
			return Process{}, err
		}
		r := Run{Start: c.end + gap*PageSize, Pages: v >> 2, Blob: Zero}
		switch v & 3 {
		case kindZero:
		case kindNext:
			if !c.data {
				return Process{}, fmt.Errorf("%w: first stored run of process %d has no place", ErrFormat, pid)
			}
			r.Blob, r.Page = c.blob, c.page
		case kindAt:
			blob, err := d.uvarint(1<<31 - 1)
			if err != nil {
				return Process{}, err
			}
			if r.Page, err = d.uvarint(maxBlobPages); err != nil {
				return Process{}, err
			}
			r.Blob = int(blob)
		default:
			return Process{}, fmt.Errorf("%w: unknown kind of run in process %d", ErrFormat, pid)
		}
		// Checked again with the blobs by validate; here so that the sums stay small.
		if r.Start >= maxAddress || r.Pages > (maxAddress-r.Start)/PageSize {
			return Process{}, fmt.Errorf("%w: run at %#x with %d pages leaves the address space", ErrFormat, r.Start, r.Pages)
		}
		p.Runs = append(p.Runs, r)
		c.advance(r)
	}
	return p, nil
}
