// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"os"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/seal"
)

// memory is what became of a dump's pages.
type memory struct {
	index *pageindex.Index
	keys  []*seal.Blob // of its blobs, if they are encrypted
	fresh int          // the first so many blobs are new, the others known
	stats pageblob.Stats
}

// uploadMemory sends the lazy pages of all processes into page blobs.
func (u *uploader) uploadMemory(ctx context.Context, images *image.Dir, maps []*image.Pagemap, known *pageblob.Known, encrypt bool) (memory, error) {
	var out memory
	err := attempt(ctx, func() error {
		w := pageblob.NewWriter(ctx, pageblob.Options{
			Known: known,
			Seal:  encrypt,
			Open: func() (pageblob.Sink, error) {
				return u.open(ctx, mediaType(checkpoint.MediaTypePages, encrypt)), nil
			},
			Progress: func(s pageblob.Stats) {
				u.meter.update(func(p *Progress) { p.Memory = s.Pages })
			},
		})
		for _, m := range maps {
			if m.Shared {
				continue
			}
			if err := addProcess(w, images, m); err != nil {
				err = fmt.Errorf("memory of process %d: %w", m.ID, err)
				w.Abort(err)
				return err
			}
		}
		var err error
		out.index, out.fresh, out.stats, err = w.Close()
		out.keys = w.Keys()
		return err
	})
	if err == nil {
		u.meter.update(func(p *Progress) { p.Memory = p.MemoryTotal })
	}
	return out, err
}

// readSize is how much memory is read from a pages file at once.
const readSize = 1 << 20

func addProcess(w *pageblob.Writer, images *image.Dir, m *image.Pagemap) error {
	// CRIU asks for a page handler for a process without a lazy page, too.
	if err := w.Begin(uint32(m.ID)); err != nil || m.LazySize() == 0 {
		return err
	}
	f, err := images.OpenPages(m)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, min(readSize, m.LazySize()))
	for r := range m.Lazy() {
		if err := addRange(w, f, r, buf); err != nil {
			return err
		}
	}
	return nil
}

func addRange(w *pageblob.Writer, f *os.File, r image.Range, buf []byte) error {
	left := int64(r.Pages) * image.PageSize
	for addr, off := r.Start, r.Offset; left > 0; {
		p := buf[:min(left, int64(len(buf)))]
		if _, err := f.ReadAt(p, off); err != nil {
			return err
		}
		if err := w.Add(addr, p); err != nil {
			return err
		}
		n := int64(len(p))
		addr, off, left = addr+uint64(n), off+n, left-n
	}
	return nil
}
