// SPDX-License-Identifier: Apache-2.0

// Package hostile makes checkpoint images that try to harm the node which restores them. Each comes from one good image
// with one thing changed, a Trick, and must be refused with that trick's own message.
//
// The good image is any that a registry has: tests without the stack publish a small dump that is stored, those with it what
// they have dumped themselves. Archives for `thaw convert` are made the same way (ArchiveTrick).
package hostile

import (
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Trick is one way in which an image may lie.
type Trick struct {
	// Name is unique, and good for a tag.
	Name string
	// Make changes a good image.
	Make func(*Image)
	// Pod changes the spec of the container that is to be restored, where the trick needs a certain one.
	Pod func(*specs.Spec)
	// Says is part of the message that it is refused with.
	Says string
	// Late is true if it is seen only when a page is fetched, which nobody does before the container runs.
	Late bool
}

// Apply makes the change. It fails if the image lacks what the trick changes, such as a second process.
func (t *Trick) Apply(i *Image) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("trick %s: %v", t.Name, r)
		}
	}()
	t.Make(i)
	return nil
}

// Tricks returns all of them.
func Tricks() []Trick {
	return slices.Concat(
		directoryTricks(), frameTricks(), taskTricks(), memoryTricks(), pagemapTricks(), namespaceTricks(), mountTricks(), fileTricks(), socketTricks(), tmpfsTricks(),
		stateTricks(), bombTricks(), pageIndexTricks(), blobTricks(), manifestTricks(), sealedTricks(), indexTricks(), configTricks(),
	)
}
