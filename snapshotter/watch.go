// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// watch ends the group with an error when one of the paths is gone. A daemon whose sockets
// have no names any more cannot be reached: only the next run can make new ones, and it goes on with the restores.
func watch(ctx context.Context, g *errgroup.Group, paths []string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch the state folder: %w", os.NewSyscallError("inotify_init1", err))
	}
	f := os.NewFile(uintptr(fd), "inotify")
	for _, p := range paths {
		dir := filepath.Dir(p) // again for one that is watched already makes no difference
		const events = unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
		if _, err := unix.InotifyAddWatch(fd, dir, events); err != nil {
			f.Close()
			return fmt.Errorf("watch the state folder: %w", &os.PathError{Op: "inotify_add_watch", Path: dir, Err: err})
		}
	}
	g.Go(func() error {
		<-ctx.Done()
		return f.Close() // ends the other
	})
	g.Go(func() error {
		buf := make([]byte, 64<<10)
		for {
			for _, p := range paths {
				if _, err := os.Lstat(p); err != nil && ctx.Err() == nil {
					return fmt.Errorf("%s is gone: thaw-snapshotter has to be started anew: %w", p, err)
				}
			}
			if _, err := f.Read(buf); err != nil { // what the events are does not matter
				if ctx.Err() != nil {
					return nil
				}
				return fmt.Errorf("watch the state folder: %w", err)
			}
		}
	})
	return nil
}
