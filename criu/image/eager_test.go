// SPDX-License-Identifier: Apache-2.0

package image

import (
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMakeEager(t *testing.T) {
	const anonymous = unix.MAP_ANONYMOUS | unix.MAP_PRIVATE
	page := func(n int) uint64 { return uint64(n) * PageSize }
	area := func(start, end int, flags uint32, advice uint64) Area {
		return Area{Start: page(start), End: page(end), Flags: flags, Advice: advice, Status: AreaRegular | AreaAnonPrivate}
	}
	task := func(pid, ppid uint32, areas ...Area) Task {
		return Task{PID: pid, PPID: ppid, Memory: &Memory{Areas: areas}}
	}
	tasks := []Task{
		task(1, 0, area(10, 20, anonymous|unix.MAP_LOCKED, 0), area(20, 30, anonymous, 1<<unix.MADV_WIPEONFORK)),
		// A child of it, which has not locked what it inherited, and one of that.
		task(2, 1, area(10, 20, anonymous, 0), area(20, 40, anonymous, 0)),
		task(3, 2, area(10, 20, anonymous, 0), area(40, 50, anonymous, 1<<unix.MADV_DONTFORK)),
		{PID: 4, PPID: 3, State: 6}, // gone
		task(5, 6), task(6, 5),      // damaged images
	}
	for _, wide := range []bool{false, true} {
		pagemap := func(id uint64, ranges ...Range) *Pagemap {
			p := &Pagemap{ID: id, PagesID: uint32(id), wide: wide}
			for _, r := range ranges {
				r.Offset = p.Size
				p.Size += int64(r.Pages) * PageSize
				p.Ranges = append(p.Ranges, r)
			}
			return p
		}
		lazy := func(start, end int) Range { return Range{Start: page(start), Pages: uint64(end - start), Lazy: true} }
		eager := func(start, end int) Range { return Range{Start: page(start), Pages: uint64(end - start)} }
		maps := []*Pagemap{
			pagemap(1, eager(10, 12), lazy(18, 33), lazy(34, 35)),
			pagemap(2, lazy(5, 45)),
			pagemap(3, lazy(10, 11), eager(11, 12), lazy(19, 21), lazy(45, 46)),
			pagemap(4), pagemap(5, lazy(1, 2)), pagemap(6, lazy(1, 2)),
			{ID: 10, Shared: true, Ranges: []Range{lazy(10, 20)}},
		}
		changed := MakeEager(tasks, maps)
		want := []*Pagemap{
			pagemap(1, eager(10, 12), lazy(18, 20), eager(20, 30), lazy(30, 33), lazy(34, 35)),
			pagemap(2, lazy(5, 10), eager(10, 20), lazy(20, 45)),
			pagemap(3, eager(10, 11), eager(11, 12), eager(19, 20), lazy(20, 21), lazy(45, 46)),
		}
		for i, w := range want {
			if !reflect.DeepEqual(maps[i], w) {
				t.Errorf("task %d: %+v, want %+v", w.ID, maps[i], w)
			}
			read := &Pagemap{ID: w.ID}
			if err := read.parse(changed[w.name()]); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(read, w) {
				t.Errorf("task %d reads back as %+v, want %+v", w.ID, read, w)
			}
		}
		if len(changed) != len(want) {
			t.Errorf("%d files changed", len(changed))
		}
	}
}
