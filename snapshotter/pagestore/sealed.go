// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"strings"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/seal"
)

// sealedSuffix marks the folders of encrypted checkpoints' blobs.
const sealedSuffix = ".sealed"

func folderKey(index *pageindex.Blob, opener *seal.Blob) string {
	if opener == nil {
		return index.Key()
	}
	return opener.CacheKey(index.Key()) + sealedSuffix
}

// Forget removes what is there of an encrypted checkpoint's blob. If it is in use, as by a fetch that is about
// to be broken off, that happens at its last release, unless it is acquired again.
func (s *Store) Forget(index *pageindex.Blob, opener *seal.Blob) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch f := s.folders[folderKey(index, opener)]; {
	case f == nil:
	case f.open != nil:
		f.open.forget = true
	default:
		s.remove(f)
	}
}

// ForgetSealed removes what is there of any encrypted checkpoint's blob that is not in
// use.
func (s *Store) ForgetSealed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, f := range s.folders {
		if f.open == nil && strings.HasSuffix(key, sealedSuffix) {
			s.remove(f)
		}
	}
}
