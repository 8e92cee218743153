// SPDX-License-Identifier: Apache-2.0

// Package criulog keeps CRIU's logs of dumps and restores that failed. CRIU
// writes them into work directories that go with the failure.
package criulog

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Dir is where logs are kept: DIR/ID/dump.log and DIR/ID/restore.log.
	Dir = "/var/log/thaw"

	// Dump and Restore are the names of the logs.
	Dump    = "dump.log"
	Restore = "restore.log"

	// MaxSize bounds in bytes how much of a log is kept. At the highest verbosity
	// that of a large container is some MiB.
	MaxSize = 64 << 20

	// keep is how many logs stay: a pod that fails again and again leaves one for
	// each attempt.
	keep = 64
)

// Keep copies the log Dump or Restore in a work directory to where it outlives
// that, and returns the copy's path. The oldest logs beyond 64 are removed.
func Keep(dir, id, work, name string) (kept string, err error) {
	in, err := os.OpenFile(filepath.Join(work, name), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("keep CRIU's log: %w", err)
	}
	defer in.Close()
	folder := filepath.Join(dir, id)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", fmt.Errorf("keep CRIU's log: %w", err)
	}
	kept = filepath.Join(folder, name)
	out, err := os.OpenFile(kept, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", fmt.Errorf("keep CRIU's log: %w", err)
	}
	_, err = io.Copy(out, io.LimitReader(in, MaxSize))
	if err = errors.Join(err, out.Close()); err == nil {
		err = prune(dir)
	}
	if err != nil {
		return "", fmt.Errorf("keep CRIU's log: %w", err)
	}
	return kept, nil
}

// prune removes the oldest logs, and their folders if nothing else is in them:
// dir may be one that others use too.
func prune(dir string) error {
	folders, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	type log struct {
		path string
		time time.Time
	}
	var logs []log
	for _, f := range folders {
		for _, name := range []string{Dump, Restore} {
			path := filepath.Join(dir, f.Name(), name)
			if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() {
				logs = append(logs, log{path, info.ModTime()})
			}
		}
	}
	slices.SortFunc(logs, func(a, b log) int { return b.time.Compare(a.time) })
	var errs []error
	for _, l := range logs[min(keep, len(logs)):] {
		if err := os.Remove(l.path); err != nil && !errors.Is(err, os.ErrNotExist) { // somebody else prunes as well
			errs = append(errs, err)
		}
		_ = unix.Rmdir(filepath.Dir(l.path)) // stays if it is not empty
	}
	return errors.Join(errs...)
}
