// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// memoryDirs are where dumps go unless the user says otherwise.
var memoryDirs = []string{"/run/thaw", "/dev/shm"}

// margin is for what the estimate of memory leaves out, such as the content of
// tmpfs mounts and pipes.
const margin = 64 << 20

// dumpPrefix is what the names of folders for dumps begin with.
const dumpPrefix = "thaw-dump-"

// folder is a folder for one dump. It is locked as long as it is in use, so that
// what a killed process left behind can be told from it.
type folder struct {
	path string
	lock *os.File
}

func newFolder(in string) (*folder, error) {
	path, err := os.MkdirTemp(in, dumpPrefix)
	if err != nil {
		return nil, err
	}
	lock, err := lockFolder(path)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	return &folder{path, lock}, nil
}

func (f *folder) remove() error { return errors.Join(os.RemoveAll(f.path), f.lock.Close()) }

func lockFolder(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// abandoned is how old a folder without lock must be: its owner needs a moment
// between making and locking it.
const abandoned = time.Minute

// sweep removes the dumps of processes that were killed: they hold memory.
func sweep(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.IsDir() || !strings.HasPrefix(e.Name(), dumpPrefix) || time.Since(info.ModTime()) < abandoned {
			continue
		}
		path := filepath.Join(dir, e.Name())
		lock, err := lockFolder(path)
		if err != nil {
			continue // in use, or not ours
		}
		if err := errors.Join(os.RemoveAll(path), lock.Close()); err != nil {
			log.L.WithError(err).Warnf("the left-over dump %s cannot be removed", path)
		}
	}
}

// memoryDir makes a folder for a dump of about need bytes in dir, or where there
// is room.
func memoryDir(dir string, need int64) (*folder, error) {
	dirs := memoryDirs
	if dir != "" {
		dirs = []string{dir}
	}
	for _, d := range dirs { // before room is measured
		sweep(d)
	}
	var errs []error
	for _, d := range dirs {
		if d == memoryDirs[0] {
			if err := os.MkdirAll(d, 0o700); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if err := holdsMemory(d, need); err != nil {
			errs = append(errs, err)
			continue
		}
		return newFolder(d)
	}
	return nil, fmt.Errorf("no room in memory for the dump: %w", errors.Join(errs...))
}

// holdsMemory checks that a folder is on a tmpfs with room.
func holdsMemory(dir string, need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		return fmt.Errorf("%s is on a disk, which would freeze the container for long: mount a tmpfs there or name one with --dump-dir", dir)
	}
	if st.Type == unix.TMPFS_MAGIC && st.Blocks > 0 {
		if free := int64(st.Bavail) * st.Bsize; free < need+margin {
			return fmt.Errorf("%s has %d MiB left, the container needs about %d: enlarge it (mount -o remount,size=...) or name another tmpfs with --dump-dir", dir, free>>20, (need+margin)>>20)
		}
	}
	return nil
}
