// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"errors"
	"fmt"
	"io/fs"

	"thaw.dev/thaw/criu/image"
)

// memory checks that every dumped page has its place: lazy pages lie in areas
// that CRIU registers with userfaultfd, since elsewhere they would stay zero, and
// each pages file is as long as its pagemap says.
func (c *check) memory() error {
	all, err := c.dir.Pagemaps()
	if err != nil {
		return err
	}
	tasks := make(map[uint64]*image.Task)
	for i := range c.tasks {
		if t := &c.tasks[i]; t.Memory != nil {
			tasks[uint64(t.PID)] = t
		}
	}
	for _, p := range all {
		if err := p.Complete(); err != nil {
			return err
		}
		f, err := c.dir.OpenPages(p)
		if err != nil && (p.Size > 0 || !errors.Is(err, fs.ErrNotExist)) {
			return err
		}
		if err == nil {
			f.Close()
		}
		if p.Shared {
			if p.LazySize() > 0 {
				return fmt.Errorf("%w: shared memory %d has lazy pages, which nobody would fill", image.ErrFormat, p.ID)
			}
			continue
		}
		t := tasks[p.ID]
		if t == nil {
			return fmt.Errorf("%w: pagemap-%d.img belongs to no process", image.ErrFormat, p.ID)
		}
		if err := fits(p, t.Memory.Areas); err != nil {
			return err
		}
	}
	return nil
}

// fits checks that all ranges lie in areas, and lazy ones in areas that are filled
// lazily. Both lists ascend.
func fits(p *image.Pagemap, areas []image.Area) error {
	i := 0
	for _, r := range p.Ranges {
		for at := r.Start; at < r.End(); {
			for i < len(areas) && (areas[i].End <= at || areas[i].Status&image.AreaGuard != 0) {
				i++
			}
			if i == len(areas) || areas[i].Start > at {
				return fmt.Errorf("%w: process %d has pages at %#x, in no memory", image.ErrFormat, p.ID, at)
			}
			if r.Lazy && !areas[i].Lazy() {
				return fmt.Errorf("%w: process %d has lazy pages at %#x, in no memory that is filled lazily", image.ErrFormat, p.ID, at)
			}
			at = min(areas[i].End, r.End())
		}
	}
	return nil
}
