// SPDX-License-Identifier: Apache-2.0

package workingset

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

// MaxKept is how many sets a node keeps; those that were not used for the longest
// time go first. All of them take 120 MiB at most, a few MiB as a rule.
const MaxKept = 1024

const tmpPrefix = ".tmp-"

// Store keeps the sets of a node in a folder, each in a file named after the
// checkpoint's digest. Its methods may be called at the same time.
type Store struct {
	dir  string
	kept int

	mu sync.Mutex // of all that changes files
}

// Open opens the store, in a folder that is made if there is none.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("working sets: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("working sets: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return nil, fmt.Errorf("working sets: %w", err)
			}
		}
	}
	return &Store{dir: dir, kept: MaxKept}, nil
}

func (s *Store) path(checkpoint digest.Digest) (string, error) {
	if checkpoint.Validate() != nil || checkpoint.Algorithm() != digest.SHA256 {
		return "", fmt.Errorf("%.80q is no SHA-256 digest: %w", checkpoint, errdefs.ErrInvalidArgument)
	}
	return filepath.Join(s.dir, checkpoint.Encoded()), nil
}

// Get returns the set of a checkpoint. One that is damaged or missing is
// errdefs.ErrNotFound.
func (s *Store) Get(checkpoint digest.Digest) (*Set, error) {
	path, err := s.path(checkpoint)
	if err != nil {
		return nil, err
	}
	set, err := read(path)
	if err != nil || set.Checkpoint != checkpoint {
		return nil, fmt.Errorf("no working set of checkpoint %s is on this node: %w", checkpoint, errors.Join(errdefs.ErrNotFound, err))
	}
	now := time.Now()
	_ = os.Chtimes(path, now, now) // the next Put may take another for older
	return set, nil
}

func read(path string) (*Set, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, int64(MaxEncodedSize)+1))
	if err != nil {
		return nil, err
	}
	return Parse(p)
}

// Put keeps a set in the place of the one that was there. Sets are never merged:
// what is not touched any more is forgotten. Only a partial set does not replace a
// whole one, and an empty set replaces nothing.
func (s *Store) Put(set *Set) (err error) {
	path, err := s.path(set.Checkpoint)
	if err != nil {
		return err
	}
	p, err := set.Encode()
	if err != nil || len(set.Chunks) == 0 {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if set.Partial {
		if old, err := read(path); err == nil && !old.Partial {
			return nil
		}
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil { // removed under a daemon that runs
		return fmt.Errorf("working sets: %w", err)
	}
	f, err := os.CreateTemp(s.dir, tmpPrefix)
	if err != nil {
		return fmt.Errorf("working sets: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("working sets: %w", errors.Join(err, os.Remove(f.Name())))
		}
	}()
	_, err = f.Write(p)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	s.trim(filepath.Base(path))
	return nil
}

// trim removes the oldest sets beyond what is kept, but not the one just put.
func (s *Store) trim(keep string) {
	for {
		entries, err := os.ReadDir(s.dir)
		if err != nil || len(entries) <= s.kept {
			return
		}
		var oldest string
		var when time.Time
		for _, e := range entries {
			info, err := e.Info()
			if err == nil && e.Name() != keep && (oldest == "" || info.ModTime().Before(when)) {
				oldest, when = e.Name(), info.ModTime()
			}
		}
		if oldest == "" || os.Remove(filepath.Join(s.dir, oldest)) != nil {
			return
		}
	}
}
