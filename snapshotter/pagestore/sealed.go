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

// Forget removes what is there of an encrypted checkpoint's blob, unless it is in use.
func (s *Store) Forget(index *pageindex.Blob, opener *seal.Blob) {
	s.forget(func(key string) bool { return key == folderKey(index, opener) })
}

// ForgetSealed removes what is there of any encrypted checkpoint's blob that is not in
// use.
func (s *Store) ForgetSealed() {
	s.forget(func(key string) bool { return strings.HasSuffix(key, sealedSuffix) })
}

func (s *Store) forget(which func(key string) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, f := range s.folders {
		if f.open == nil && which(key) {
			s.remove(f)
		}
	}
}
