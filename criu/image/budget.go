// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"strings"
)

// Bounds in bytes of the files of one dump that are read into memory. A dump of a
// thousand processes has about 40 MiB of messages; a pagemap has 20 bytes for each
// entry.
const (
	maxMessages    = 128 << 20 // all messages but pagemaps
	maxPagemaps    = 256 << 20 // all pagemaps
	maxDescriptors = 64 << 10
)

// Budget bounds the files of one dump that are read into memory. The zero value is a
// whole one.
type Budget struct{ messages, pagemaps int64 }

// Take accounts for a file of a dump, by its name and its length in bytes. Files that
// hold memory or content are bounded by others.
func (b *Budget) Take(name string, size int64) error {
	var spent *int64
	var most int64
	switch k := KindOf(name); {
	case k == Message && strings.HasPrefix(name, "pagemap-"):
		spent, most = &b.pagemaps, maxPagemaps
	case k == Message:
		spent, most = &b.messages, maxMessages
	case k == Descriptors:
		spent, most = new(int64), maxDescriptors
	default:
		return nil
	}
	if size > most-*spent {
		return fmt.Errorf("%w: %s has %d bytes, with which images of its kind are over the limit of %d", ErrFormat, name, size, most)
	}
	*spent += size
	return nil
}
