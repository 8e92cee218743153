// SPDX-License-Identifier: Apache-2.0

package pager

// span is a range of virtual memory.
type span struct{ start, end uint64 }

// lacking returns what of a parent's ranges a new child has no mapping for: what the parent's program does not want to be inherited
// (MADV_DONTFORK, of which there is no event). It must not be filled if the child has something else there some day.
//
// A child does not run before the event of its fork was read and its parent has gone on, so that the answer is about what it
// inherited. If it changes its mappings already, the rest is left as it is.
func (s *space) lacking(wanted *ranges) (lacks []span) {
	for _, l := range wanted.leaves {
		for _, seg := range l.segs {
			n := seg.end - seg.start // mostly all of it is in one mapping
			for at := seg.start; at < seg.end; {
				switch here, err := s.fd.Registered(at, n); {
				case err != nil:
					return lacks
				case here:
					at += n
					n = min(2*n, seg.end-at)
				case n > pageSize:
					n = n / 2 &^ (pageSize - 1)
				default:
					if k := len(lacks); k > 0 && lacks[k-1].end == at {
						lacks[k-1].end += pageSize
					} else {
						lacks = append(lacks, span{at, at + pageSize})
					}
					at += pageSize
				}
			}
		}
	}
	return lacks
}
