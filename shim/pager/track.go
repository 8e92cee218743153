// SPDX-License-Identifier: Apache-2.0

package pager

// track is memory that was wanted at the beginning of an epoch and that events moved
// or freed, all of it by the same ones.
type track struct {
	pages []segment // where they were then; never empty
	steps []step    // what happened to them
}

// step is one thing that happened to memory.
type step struct {
	event int
	at    uint64 // where its first page is from then on, or gone
}

const gone = ^uint64(0)

// at returns where the first page is after so many steps.
func (t *track) at(stage int) uint64 {
	if stage == 0 {
		return t.pages[0].start
	}
	return t.steps[stage-1].at
}

// split parts a track where some addresses after so many steps are: what is in front
// of them, between them and behind them. Each may be empty.
func (t *track) split(stage int, start, end uint64) (parts [3]track) {
	first, at := t.pages[0].start, t.at(stage)
	for _, s := range t.pages {
		for i, limit := range []uint64{start, end, gone} {
			if limit != gone {
				limit = max(limit, at) - at + first // where that was in the beginning
			}
			if s.start < limit {
				parts[i].pages = append(parts[i].pages, s.to(min(s.end, limit)))
			}
			if s.end <= limit {
				break
			}
			s = s.from(max(s.start, limit))
		}
	}
	for i := range parts {
		for _, v := range t.steps {
			if len(parts[i].pages) > 0 && v.at != gone {
				v.at += parts[i].pages[0].start - first
			}
			parts[i].steps = append(parts[i].steps, v)
		}
	}
	return parts
}

// reported tells how many of its steps are among so many events.
func (t *track) reported(events int) (n int) {
	for k, s := range t.steps {
		if s.event < events {
			n = k + 1
		}
	}
	return n
}

// divide parts a track so that what is lacking of it in one place or another is apart from what is not.
func (t *track) divide(lacking func(*ranges) []span) []track {
	parts := []track{*t}
	for stage := range len(t.steps) + 1 {
		if t.at(stage) == gone {
			continue
		}
		var there ranges
		for _, s := range t.pages {
			s.start, s.end = s.start-t.pages[0].start+t.at(stage), s.end-t.pages[0].start+t.at(stage)
			there.insert(s)
		}
		for _, l := range lacking(&there) {
			parts = cut(parts, stage, l)
		}
	}
	return parts
}

// cut parts tracks where a range of addresses is after so many steps.
func cut(tracks []track, stage int, at span) (out []track) {
	for _, t := range tracks {
		for _, part := range t.split(stage, at.start, at.end) {
			if len(part.pages) > 0 {
				out = append(out, part)
			}
		}
	}
	return out
}
