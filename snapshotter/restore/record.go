// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/checkpoint"
)

// record is what is kept of a restore for the next run of the daemon.
type record struct {
	ID        string    `json:"id"`
	Namespace string    `json:"namespace"`
	Container string    `json:"container"`
	Bundle    string    `json:"bundle"`
	Image     string    `json:"image"`
	Manifest  string    `json:"manifest"`
	Size      int64     `json:"size"` // of the manifest, in bytes
	Policy    string    `json:"policy"`
	Pod       string    `json:"pod,omitempty"`
	Started   time.Time `json:"started"`
}

const maxRecordSize = 64 << 10

// RecordDir is the folder of the restores' records.
func (m *Manager) RecordDir() string { return filepath.Join(m.opts.StateDir, "restores") }

// ImagesDir is the folder of the images that are laid out.
func (m *Manager) ImagesDir() string { return m.layouts.dir }

func (r *record) path(dir string) string {
	sum := sha256.Sum256([]byte(r.ID))
	return filepath.Join(dir, hex.EncodeToString(sum[:16])+".json")
}

// write stores the record, whole or not at all.
func (r *record) write(dir string) (err error) {
	p, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, tmpPrefix)
	if err != nil {
		return fmt.Errorf("record of the restore: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(p)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("record of the restore: %w", err)
	}
	if err := os.Rename(f.Name(), r.path(dir)); err != nil {
		return fmt.Errorf("record of the restore: %w", err)
	}
	return nil
}

// keep writes the record again if it is gone and the container is not.
func (r *record) keep(dir string) error {
	if _, err := os.Lstat(r.path(dir)); err == nil || r.gone() {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("record of the restore: %w", err)
	}
	return r.write(dir)
}

func (r *record) remove(dir string) error {
	if err := os.Remove(r.path(dir)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("record of the restore: %w", err)
	}
	return nil
}

// recover goes on with the restores of an earlier run whose containers are
// still there.
func (m *Manager) recover(ctx context.Context) error {
	dir := m.RecordDir()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("records of restores: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("records of restores: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("records of restores: %w", err)
			}
			continue
		}
		if err := m.recoverOne(ctx, path); err != nil {
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) {
				return fmt.Errorf("restores of an earlier run (raise the daemon's limits, LimitNOFILE in its unit): %w", err)
			}
			if !errors.Is(err, errGone) {
				log.G(ctx).WithError(err).WithField("record", path).Error("a restore cannot go on: its container fails when it needs a page that is not there yet")
			}
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("records of restores: %w", err)
			}
		}
	}
	return nil
}

// gone reports whether the container is: its bundle is removed with it.
func (r *record) gone() bool {
	_, err := os.Stat(r.Bundle)
	return errors.Is(err, os.ErrNotExist)
}

const (
	// sweepInterval is how long a restore that nobody released may stay.
	sweepInterval = time.Minute
	// sweepSoon is how long after the daemon's start: shims that ended while it was
	// away released nothing, and their containers may go just then.
	sweepSoon = 5 * time.Second
)

// sweepAgain sweeps until the manager is closed.
func (m *Manager) sweepAgain() {
	next := time.NewTimer(sweepSoon)
	defer next.Stop()
	for {
		select {
		case <-next.C:
			m.sweep()
			next.Reset(sweepInterval)
		case <-m.ctx.Done():
			return
		}
	}
}

// sweep ends the restores whose containers are gone: a shim that did not get the
// answer to Prepare, or found no daemon when its container ended, released
// nothing.
func (m *Manager) sweep() {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.restores))
	m.mu.Unlock()
	for _, r := range all {
		if !r.record.gone() {
			continue
		}
		if err := m.release(r); err != nil {
			log.G(m.ctx).WithError(err).Warn("restore of a container that is gone")
		}
	}
	m.sweepSealed()
}

var errGone = errors.New("container is gone")

func (m *Manager) recoverOne(ctx context.Context, path string) (err error) {
	p, err := readBounded(path, maxRecordSize)
	if err != nil {
		return err
	}
	r := &restored{}
	if err := json.Unmarshal(p, &r.record); err != nil {
		return err
	}
	if r.record.gone() {
		return errGone
	}
	d, err := digest.Parse(r.record.Manifest)
	if err != nil {
		return err
	}
	if !keyValid(d.Encoded()) || r.record.ID != ID(r.record.Namespace, r.record.Container) {
		return errors.New("damaged record")
	}
	if r.repo, err = m.repository(r.record.Image); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			m.letGo(r)
		}
	}()
	r.ctx, r.cancel = context.WithCancel(m.ctx)
	if r.layout, err = m.layouts.adopt(d.Encoded()); errors.Is(err, os.ErrNotExist) {
		// Somebody has removed it; what it was made of is in the cache or the registry.
		r.layout, err = m.layouts.acquire(ctx, r.repo.Repository, v1.Descriptor{
			MediaType: v1.MediaTypeImageManifest, ArtifactType: checkpoint.ArtifactType, Digest: d, Size: r.record.Size,
		})
	}
	if err != nil {
		return err
	}
	m.layouts.note(r.layout, r.record.Namespace, r.record.Image)
	if err := m.take(r); err != nil {
		return err
	}
	return m.add(r)
}
