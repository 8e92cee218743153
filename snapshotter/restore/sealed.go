// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/seal"
)

// sealedFile is in the folder of an encrypted checkpoint's layout, on the tmpfs, for the next
// run of the daemon: restores go on without the node's keys.
const sealedFile = "sealed.json"

// maxSealedFile bounds it in bytes: 32768 keys, and what annotations may take.
const maxSealedFile = 4 << 20

// sealed is what a layout has of an encrypted checkpoint.
type sealed struct {
	// Keys are the annotations with the wrapped key.
	Keys map[string]string `json:"keys"`
	// Blobs are the keys of the page blobs.
	Blobs []string `json:"blobs"`

	blobs []*seal.Blob

	// The image that was restored last, guarded by layouts.mu.
	namespace, image string
}

// opener opens the chunks of a page blob.
func (s *sealed) opener(blob int) *seal.Blob {
	if s == nil {
		return nil
	}
	return s.blobs[blob]
}

// unwrapped returns an encrypted checkpoint's key.
type unwrapped func() (seal.Key, error)

// unwrapping unwraps a checkpoint's key once, for whoever needs it first.
func (s *layouts) unwrapping(ctx context.Context, img *checkpoint.Image) unwrapped {
	return sync.OnceValues(func() (seal.Key, error) {
		ctx, span := startSpan(ctx, "Unwrap")
		defer span.End()
		return s.keys.Unwrap(ctx, img.Keys)
	})
}

// openIndex opens a page index, whose digest was verified.
func openIndex(p []byte, key unwrapped, keys map[string]string) (*sealed, []byte, error) {
	k, err := key()
	if err != nil {
		return nil, nil, err
	}
	if p, err = seal.Open(p, k, seal.PageIndex); err != nil {
		return nil, nil, fmt.Errorf("%w: page index: %w", checkpoint.ErrFormat, err)
	}
	s := &sealed{Keys: keys}
	if s.blobs, p, err = seal.SplitKeys(p); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", checkpoint.ErrFormat, err)
	}
	return s, p, nil
}

// openState returns a reader of what is in a state, whose digest was verified.
func openState(in io.Reader, key unwrapped) (io.Reader, error) {
	k, err := key()
	if err != nil {
		return nil, err
	}
	r, err := seal.NewReader(in, k, seal.State)
	if err != nil {
		return nil, fmt.Errorf("%w: state: %w", checkpoint.ErrFormat, err)
	}
	return r, nil
}

// write writes the file. It refuses keys that are not as many as the page blobs.
func (s *sealed) write(dir string, blobs int) error {
	if len(s.blobs) != blobs {
		return fmt.Errorf("%w: page index has %d page blobs and %d keys", checkpoint.ErrFormat, blobs, len(s.blobs))
	}
	for _, b := range s.blobs {
		k := b.Key()
		s.Blobs = append(s.Blobs, base64.StdEncoding.EncodeToString(k[:]))
	}
	p, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, sealedFile), p, 0o600); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	return nil
}

// readSealed reads what an earlier run wrote; nil if the checkpoint is in plain.
func readSealed(dir string, blobs int) (*sealed, error) {
	p, err := readBounded(filepath.Join(dir, sealedFile), maxSealedFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s := &sealed{}
	if err := json.Unmarshal(p, s); err != nil {
		return nil, fmt.Errorf("%s: %w", sealedFile, err)
	}
	for _, text := range s.Blobs {
		k, err := base64.StdEncoding.DecodeString(text)
		if err != nil || len(k) != seal.KeySize {
			return nil, fmt.Errorf("%s holds a damaged key", sealedFile)
		}
		s.blobs = append(s.blobs, seal.NewBlob(seal.Key(k)))
	}
	if len(s.blobs) != blobs {
		return nil, fmt.Errorf("%s holds %d keys for %d page blobs", sealedFile, len(s.blobs), blobs)
	}
	return s, nil
}

// note remembers which image an encrypted checkpoint was restored as.
func (s *layouts) note(l *layout, namespace, image string) {
	if l.sealed == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l.sealed.namespace, l.sealed.image = namespace, image
}

// idle is an encrypted checkpoint that nobody uses.
type idle struct {
	layout           *layout
	namespace, image string
}

func (s *layouts) idle() (out []idle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.all {
		if l.refs == 0 && l.sealed != nil {
			out = append(out, idle{l, l.sealed.namespace, l.sealed.image})
		}
	}
	return out
}

// forget removes an encrypted checkpoint with its pages, unless it is used again.
func (s *layouts) forget(i idle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := i.layout; s.all[l.key] == l && l.refs == 0 && l.sealed.image == i.image && l.sealed.namespace == i.namespace {
		s.remove(l)
	}
}

// sweepSealed removes what is in plain of encrypted checkpoints whose images are gone
// from the node.
func (m *Manager) sweepSealed() {
	for _, i := range m.layouts.idle() {
		if i.image != "" {
			_, err := m.opts.Images.Target(m.ctx, i.namespace, i.image)
			if err != nil && !errdefs.IsNotFound(err) {
				log.G(m.ctx).WithError(err).Warn("not known whether the image of an encrypted checkpoint is still there")
			}
			if !errdefs.IsNotFound(err) {
				continue
			}
		}
		m.layouts.forget(i)
	}
}
