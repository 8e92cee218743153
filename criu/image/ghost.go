// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"strings"

	ghost_file "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
)

// Ghost is a file that was deleted while it was open: CRIU makes it anew from
// the image.
type Ghost struct {
	File string // the image file's name
	UID  uint32
	GID  uint32
	Mode uint32 // type and permissions, as in stat(2)
}

// Ghosts returns all deleted files that the images bring along.
func (d *Dir) Ghosts() ([]Ghost, error) {
	var out []Ghost
	for _, f := range d.files {
		if f.Kind != Content || !strings.HasPrefix(f.Name, "ghost-file-") {
			continue
		}
		g, err := d.ghost(f.Name)
		if err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	return out, nil
}

func (d *Dir) ghost(name string) (Ghost, error) {
	// Only the head is read: the file's content may be large.
	in, err := d.head(name)
	if err != nil {
		return Ghost{}, err
	}
	f, err := newFrames(name, in, magicGhost)
	if err != nil {
		return Ghost{}, err
	}
	e := &ghost_file.GhostFileEntry{}
	if err := f.decode(e); err != nil {
		return Ghost{}, err
	}
	if e.Mode == nil || e.Uid == nil || e.Gid == nil {
		return Ghost{}, fmt.Errorf("%w: %s describes no file", ErrFormat, name)
	}
	return Ghost{File: name, UID: e.GetUid(), GID: e.GetGid(), Mode: e.GetMode()}, nil
}

// maxHead bounds the head of a content file in bytes: a path (4 KiB) and some
// numbers.
const maxHead = 64 << 10

// head returns the beginning of a file.
func (d *Dir) head(name string) ([]byte, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return readFull(f, min(info.Size(), maxHead))
}
