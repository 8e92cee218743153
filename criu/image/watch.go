// SPDX-License-Identifier: Apache-2.0

package image

import "github.com/checkpoint-restore/go-criu/v7/crit/images/fsnotify"

// Watch is a file that an inotify descriptor watches.
type Watch struct {
	// Path is the file's path in the container, absolute. "" if CRIU finds the file by its
	// handle (open_by_handle_at(2)) in the filesystem of Device.
	Path   string
	Device uint32 // as in Mount
}

func watches(e *fsnotify.InotifyFileEntry) []Watch {
	var out []Watch
	for _, w := range e.GetWd() {
		out = append(out, Watch{Path: w.GetFHandle().GetPath(), Device: w.GetSDev()})
	}
	return out
}
