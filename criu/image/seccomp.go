// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
)

// Filter is one seccomp filter. A thread is under the filter that it names and
// all before it in the chain of Prev.
type Filter struct {
	// Program is the classic BPF program as struct sock_filter, 8 bytes an
	// instruction.
	Program []byte
	// Prev is the index of the filter that was installed before; -1 if this was
	// the first.
	Prev  int
	Flags uint32 // as in seccomp(2): SECCOMP_FILTER_FLAG_
}

// Limits of the kernel (linux/seccomp.h, kernel/seccomp.c).
const (
	instructionSize = 8
	maxProgram      = 4096 * instructionSize
	// maxChain bounds the filters that one thread is under: the kernel lets them have 32768
	// instructions together, and counts four more for each.
	maxChain = 32768 / 5
)

// Filters returns the seccomp filters in seccomp.img; none if no thread had any.
// Each filter's Prev is less than its own index, so chains end.
func (d *Dir) Filters() ([]Filter, error) {
	const name = "seccomp.img"
	e := &seccomp.SeccompEntry{}
	if _, err := d.one(name, magicSeccomp, e); err != nil {
		return nil, err
	}
	var out []Filter
	depth := make([]int, len(e.GetSeccompFilters()))
	for i, f := range e.GetSeccompFilters() {
		filter := Filter{Program: f.GetFilter(), Prev: -1, Flags: f.GetFlags()}
		if n := len(filter.Program); n == 0 || n > maxProgram || n%instructionSize != 0 {
			return nil, fmt.Errorf("%w: %s: filter %d has %d bytes", ErrFormat, name, i, n)
		}
		if f.Prev != nil {
			filter.Prev = int(f.GetPrev())
			if filter.Prev >= i {
				return nil, fmt.Errorf("%w: %s: filter %d comes before filter %d that it stands on", ErrFormat, name, i, filter.Prev)
			}
			if depth[i] = depth[filter.Prev] + 1; depth[i] >= maxChain {
				return nil, fmt.Errorf("%w: %s: filter %d stands on more than %d others", ErrFormat, name, i, maxChain)
			}
		}
		out = append(out, filter)
	}
	return out, nil
}

// filterTSYNC makes the kernel put all threads of the process under the filter
// (linux/seccomp.h).
const filterTSYNC = 1 << 0

// SeccompOf returns the mode that thread i of the task will be in after a
// restore, and the innermost filter's index in filters. Threads that share their
// leader's filters are recorded without any: restoring the leader's puts the
// others under them, too (CRIU, criu/seccomp.c).
func (t *Task) SeccompOf(i int, filters []Filter) (SeccompMode, uint32) {
	th := &t.Threads[i]
	leader := &t.Threads[0]
	if i == 0 || th.Seccomp != SeccompDisabled || leader.Seccomp != SeccompFilter {
		return th.Seccomp, th.Filter
	}
	for n := int(leader.Filter); n >= 0; n = filters[n].Prev {
		if n >= len(filters) || filters[n].Flags&filterTSYNC == 0 {
			return SeccompDisabled, 0
		}
	}
	return SeccompFilter, leader.Filter
}
