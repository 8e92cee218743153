// SPDX-License-Identifier: Apache-2.0

// Package pageindex is the page index of a checkpoint: for every page that was
// dumped, which chunk of which page blob holds it, or that it is zero.
//
// The index describes two things that are independent of each other:
//
//   - Blobs. A page blob is a concatenation of chunks; a chunk is one zstd frame
//     that decompresses to a whole number of pages and is the unit of transfer,
//     verification and caching. Chunks lie back to back, so the place of each one
//     follows from the sizes before it and cannot be contradicted.
//   - Processes. For each address space that CRIU dumped, runs of virtual pages
//     in ascending order, each either zero or a run of consecutive pages of one
//     blob's uncompressed content.
//
// Pages that are in no run were not dumped as lazy pages: they are eager pages,
// which travel in the state, or were never there.
//
// docs/image-format.md specifies the encoding.
package pageindex

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sort"

	"github.com/opencontainers/go-digest"
)

const (
	// PageSize is the size in bytes of the pages that an index counts.
	PageSize = 4096

	// Major is the format version that this package reads and writes. An index
	// of another major version is refused.
	Major = 1

	// MaxChunkPages bounds the pages in one chunk, and with it the memory that
	// decompressing one takes (4 MiB).
	MaxChunkPages = 1024

	// MaxEncodedSize bounds an encoded index: 256 MiB describe well over 100 GiB.
	MaxEncodedSize = 256 << 20

	// maxEntries bounds runs and processes of one index in sum: one takes two
	// bytes encoded but 32 in memory, of which this allows 128 MiB. In 256 GiB a
	// run may then be as short as 64 KiB on average.
	maxEntries = 4 << 20

	// maxBlobs bounds the page blobs: so many do not fit into a manifest of 4 MiB.
	maxBlobs = 1 << 15

	// maxAddress is the end of the user part of an address space (5-level
	// paging, Documentation/arch/x86/x86_64/5level-paging.rst).
	maxAddress = 1 << 56

	// maxBlobPages bounds one blob's uncompressed size to 16 TiB so that sums
	// of pages and bytes cannot overflow.
	maxBlobPages = 1 << 32
)

// ErrFormat is wrapped by every error of Parse and Validate: the index is
// damaged, contradicts itself or is of an unknown version.
var ErrFormat = errors.New("invalid page index")

// Chunk is one independently compressed group of pages.
type Chunk struct {
	// SHA256 is the digest of the chunk as it is in the blob (the zstd frame).
	SHA256 [sha256.Size]byte
	// Size is the length of the frame in bytes.
	Size uint32
	// Pages is the number of pages that the frame decompresses to.
	Pages uint32
}

// Blob is one page blob.
type Blob struct {
	// Digest is the digest of the whole blob in the registry.
	Digest digest.Digest
	// Chunks are the blob's chunks in the order in which they lie in it.
	Chunks []Chunk

	offsets []int64  // of each chunk in the blob, in bytes; one more than chunks
	pages   []uint64 // first page of each chunk; one more than chunks
	key     string   // see Key, if it was computed
}

// Zero is the Run.Blob of pages that are all zero and stored nowhere.
const Zero = -1

// Run is a range of consecutive virtual pages.
type Run struct {
	// Start is the virtual address of the first page at dump time.
	Start uint64
	// Pages is the number of pages.
	Pages uint64
	// Blob is an index into Index.Blobs, or Zero.
	Blob int
	// Page is the first page's number in the blob's uncompressed content.
	Page uint64
}

// End is the virtual address behind the run.
func (r Run) End() uint64 { return r.Start + r.Pages*PageSize }

// Process is one dumped address space.
type Process struct {
	// PID is the process's number in CRIU's image file names (pagemap-PID.img).
	PID uint32
	// Runs are in ascending order of Start and do not overlap.
	Runs []Run
}

// Pages returns the number of pages in the process's runs, in total and without
// those that are zero.
func (p *Process) Pages() (total, stored uint64) {
	for _, r := range p.Runs {
		total += r.Pages
		if r.Blob != Zero {
			stored += r.Pages
		}
	}
	return total, stored
}

// Index is a whole page index.
type Index struct {
	Blobs     []Blob
	Processes []Process
}

// Process returns the entry of the process with that PID in CRIU's images.
func (x *Index) Process(pid uint32) (*Process, bool) {
	i := sort.Search(len(x.Processes), func(i int) bool { return x.Processes[i].PID >= pid })
	if i == len(x.Processes) || x.Processes[i].PID != pid {
		return nil, false
	}
	return &x.Processes[i], true
}

// NewBlob returns a blob with its chunks' places computed.
func NewBlob(d digest.Digest, chunks []Chunk) (Blob, error) {
	b := Blob{Digest: d, Chunks: chunks}
	return b, b.place()
}

func (b *Blob) place() error {
	if len(b.Chunks) == 0 {
		return fmt.Errorf("%w: blob %s has no chunks", ErrFormat, b.Digest)
	}
	b.offsets = make([]int64, len(b.Chunks)+1)
	b.pages = make([]uint64, len(b.Chunks)+1)
	for i, c := range b.Chunks {
		if c.Pages == 0 || c.Pages > MaxChunkPages {
			return fmt.Errorf("%w: chunk %d of blob %s has %d pages, allowed are 1 to %d", ErrFormat, i, b.Digest, c.Pages, MaxChunkPages)
		}
		if c.Size == 0 || int64(c.Size) > MaxFrameSize(c.Pages) {
			return fmt.Errorf("%w: chunk %d of blob %s is %d bytes for %d pages", ErrFormat, i, b.Digest, c.Size, c.Pages)
		}
		b.offsets[i+1] = b.offsets[i] + int64(c.Size)
		b.pages[i+1] = b.pages[i] + uint64(c.Pages)
		if b.pages[i+1] > maxBlobPages {
			return fmt.Errorf("%w: blob %s has more than %d pages", ErrFormat, b.Digest, uint64(maxBlobPages))
		}
	}
	return nil
}

// MaxFrameSize is the most bytes that a frame of that many pages may take:
// incompressible content plus zstd's headers (RFC 8878, 3.1.1).
func MaxFrameSize(pages uint32) int64 {
	n := int64(pages) * PageSize
	return n + n/256 + 128
}

// Size is the length of the blob in the registry, in bytes.
func (b *Blob) Size() int64 { return b.offsets[len(b.Chunks)] }

// Pages is the number of pages in the blob.
func (b *Blob) Pages() uint64 { return b.pages[len(b.Chunks)] }

// Offset is the position in bytes of chunk i in the blob; Offset(len(Chunks))
// is the blob's end.
func (b *Blob) Offset(i int) int64 { return b.offsets[i] }

// FirstPage is the number of the first page of chunk i in the blob's
// uncompressed content; FirstPage(len(Chunks)) is the number of pages.
func (b *Blob) FirstPage(i int) uint64 { return b.pages[i] }

// ChunkOf returns the chunk that holds a page of the blob's uncompressed
// content. The page must be less than Pages.
func (b *Blob) ChunkOf(page uint64) int {
	return sort.Search(len(b.Chunks), func(i int) bool { return b.pages[i+1] > page })
}

// Key names what the blob's uncompressed content must be: it is derived from
// the digests and sizes of the chunks alone. Two blobs with the same key have
// the same content byte for byte, whatever their image says about them, which
// is why the node's page store may share one file between all that have it.
func (b *Blob) Key() string {
	if b.key != "" {
		return b.key
	}
	h := sha256.New()
	h.Write([]byte("thaw page store v1\x00"))
	h.Write(recordsOf(b.Chunks))
	return hex.EncodeToString(h.Sum(nil))
}

// ComputeKeys computes the keys of all blobs once, for those who ask for them later.
func (x *Index) ComputeKeys() {
	for i := range x.Blobs {
		x.Blobs[i].key = x.Blobs[i].Key()
	}
}

var (
	errEntries = fmt.Errorf("%w: more than %d runs and processes: the memory is in too many pieces", ErrFormat, maxEntries)
	errBlobs   = fmt.Errorf("%w: more than %d page blobs", ErrFormat, maxBlobs)
)

// validate checks what the types cannot express and what Encode relies on.
func (x *Index) validate() error {
	if len(x.Blobs) > maxBlobs {
		return errBlobs
	}
	entries := len(x.Processes)
	for i := range x.Processes {
		entries += len(x.Processes[i].Runs)
	}
	if entries > maxEntries {
		return errEntries
	}
	known := make(map[digest.Digest]bool, len(x.Blobs))
	for i := range x.Blobs {
		b := &x.Blobs[i]
		if known[b.Digest] {
			return fmt.Errorf("%w: blob %s is in it twice", ErrFormat, b.Digest)
		}
		known[b.Digest] = true
		if err := b.Digest.Validate(); err != nil || b.Digest.Algorithm() != digest.SHA256 {
			return fmt.Errorf("%w: blob %d has digest %q, sha256 is required", ErrFormat, i, b.Digest)
		}
		if len(b.offsets) != len(b.Chunks)+1 {
			if err := b.place(); err != nil {
				return err
			}
		}
	}
	for i := range x.Processes {
		p := &x.Processes[i]
		if i > 0 && p.PID <= x.Processes[i-1].PID {
			return fmt.Errorf("%w: process %d after process %d", ErrFormat, p.PID, x.Processes[i-1].PID)
		}
		end := uint64(0)
		for _, r := range p.Runs {
			if err := x.checkRun(r, end); err != nil {
				return fmt.Errorf("%w: process %d: %w", ErrFormat, p.PID, err)
			}
			end = r.End()
		}
	}
	return nil
}

func (x *Index) checkRun(r Run, after uint64) error {
	switch {
	case r.Start%PageSize != 0:
		return fmt.Errorf("run at %#x is not page-aligned", r.Start)
	case r.Pages == 0 || r.Start < after:
		return fmt.Errorf("run at %#x is empty or overlaps the one before", r.Start)
	case r.Start >= maxAddress || r.Pages > (maxAddress-r.Start)/PageSize:
		return fmt.Errorf("run at %#x with %d pages leaves the address space", r.Start, r.Pages)
	case r.Blob == Zero:
		return nil
	case r.Blob < 0 || r.Blob >= len(x.Blobs):
		return fmt.Errorf("run at %#x refers to blob %d of %d", r.Start, r.Blob, len(x.Blobs))
	}
	if n := x.Blobs[r.Blob].Pages(); r.Page >= n || r.Pages > n-r.Page {
		return fmt.Errorf("run at %#x refers to pages %d+%d of blob %d, which has %d", r.Start, r.Page, r.Pages, r.Blob, n)
	}
	return nil
}
