// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"io"
	"os"
)

// OpenPages opens the pages file of p. Its length is what p says. The caller
// closes it.
func (d *Dir) OpenPages(p *Pagemap) (*os.File, error) {
	f, err := d.Open(p.File())
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && info.Size() != p.Size {
		err = fmt.Errorf("%w: %s has %d bytes, %s describes %d", ErrFormat, p.File(), info.Size(), p.name(), p.Size)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// CompactEager writes the eager pages of a pages file to dst, one behind the
// other: EagerSize bytes. pages is the file that CRIU wrote; what is read of it
// beyond the eager pages is nothing.
func (p *Pagemap) CompactEager(dst io.Writer, pages io.ReaderAt) error {
	if err := p.Complete(); err != nil {
		return err
	}
	for r := range p.Eager() {
		n := int64(r.Pages) * PageSize
		m, err := io.Copy(dst, io.NewSectionReader(pages, r.Offset, n))
		if err != nil {
			return fmt.Errorf("compact %s: %w", p.File(), err)
		}
		if m != n {
			return fmt.Errorf("%w: %s ends before byte %d, %s describes %d", ErrFormat, p.File(), r.Offset+n, p.name(), p.Size)
		}
	}
	return nil
}

// ExpandEager is the reverse of CompactEager: it makes dst, which must be empty,
// a pages file for CRIU of the full length in which the eager pages are at their
// places and the lazy ones are holes. src must hold EagerSize bytes and no more.
func (p *Pagemap) ExpandEager(dst *os.File, src io.Reader) error {
	if err := p.Complete(); err != nil {
		return err
	}
	for r := range p.Eager() {
		n := int64(r.Pages) * PageSize
		w := io.NewOffsetWriter(dst, r.Offset)
		if m, err := io.Copy(w, io.LimitReader(src, n)); err != nil {
			return fmt.Errorf("expand %s: %w", p.File(), err)
		} else if m != n {
			return fmt.Errorf("%w: eager pages of %s end too early: %d bytes belong to %s", ErrFormat, p.File(), p.EagerSize(), p.name())
		}
	}
	var more [1]byte
	if n, err := io.ReadFull(src, more[:]); n != 0 {
		return fmt.Errorf("%w: eager pages of %s are more than the %d bytes that belong to %s", ErrFormat, p.File(), p.EagerSize(), p.name())
	} else if err != io.EOF {
		return fmt.Errorf("expand %s: %w", p.File(), err)
	}
	if err := dst.Truncate(p.Size); err != nil {
		return fmt.Errorf("expand %s: %w", p.File(), err)
	}
	return nil
}
