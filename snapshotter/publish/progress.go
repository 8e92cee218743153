// SPDX-License-Identifier: Apache-2.0

package publish

import "sync"

// Progress says how far a Publish is. All counts are bytes and only grow,
// except after a broken connection, when what it carried is done again.
type Progress struct {
	// Memory is how much of the lazy memory has been compressed, or found to be
	// zero or known.
	Memory, MemoryTotal int64
	// Uploaded is what was sent to the registry.
	Uploaded int64
}

// meter collects progress from all goroutines and passes it on one at a time.
type meter struct {
	mu     sync.Mutex
	now    Progress
	report func(Progress)
}

func (m *meter) update(change func(*Progress)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.now)
	if m.report != nil {
		m.report(m.now)
	}
}

func (m *meter) uploaded(n int) { m.update(func(p *Progress) { p.Uploaded += int64(n) }) }
