// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"archive/tar"
	"fmt"
	"io"
	"sort"

	"github.com/klauspost/compress/zstd"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
)

// stateFile is a file of the state.
type stateFile struct {
	name  string
	size  int64
	write func(io.Writer) error
}

// stateFiles lists what belongs into the state: CRIU's images, with pages files
// reduced to their eager pages, runc's list of descriptors, and the spec. changed
// has new content of some of the images.
func stateFiles(images *image.Dir, maps []*image.Pagemap, changed map[string][]byte, spec []byte) ([]stateFile, error) {
	pages := make(map[string]*image.Pagemap, len(maps))
	for _, m := range maps {
		pages[m.File()] = m
	}
	fixed := func(name string, content []byte) stateFile {
		return stateFile{name, int64(len(content)), func(w io.Writer) error {
			_, err := w.Write(content)
			return err
		}}
	}
	out := []stateFile{fixed(checkpoint.SpecFile, spec)}
	for _, f := range images.Files() {
		switch f.Kind {
		case image.Diagnostic:
		case image.Unknown:
			return nil, fmt.Errorf("%w: CRIU wrote %.80q, which this version of thaw does not know", image.ErrFormat, f.Name)
		case image.Pages:
			m, ok := pages[f.Name]
			if !ok {
				return nil, fmt.Errorf("%w: no pagemap refers to %s", image.ErrFormat, f.Name)
			}
			out = append(out, stateFile{f.Name, m.EagerSize(), func(w io.Writer) error {
				p, err := images.OpenPages(m)
				if err != nil {
					return err
				}
				defer p.Close()
				return m.CompactEager(w, p)
			}})
		default:
			if content, ok := changed[f.Name]; ok {
				out = append(out, fixed(f.Name, content))
				continue
			}
			out = append(out, stateFile{f.Name, f.Size, func(w io.Writer) error {
				p, err := images.Open(f.Name)
				if err != nil {
					return err
				}
				defer p.Close()
				_, err = io.Copy(w, p)
				return err
			}})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].name < out[j].name })
	return out, nil
}

// writeState writes the files as tar+zstd. The same files give the same bytes.
func writeState(w io.Writer, files []stateFile) error {
	zw, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedDefault))
	if err != nil {
		return err
	}
	defer zw.Close()
	tw := tar.NewWriter(zw)
	for _, f := range files {
		// Nothing of the dump's host goes in: no times, no owners.
		err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Size: f.size, Mode: 0o600})
		if err == nil {
			err = f.write(tw)
		}
		if err != nil {
			return fmt.Errorf("state file %s: %w", f.name, err)
		}
	}
	if err := tw.Close(); err != nil {
		return err
	}
	return zw.Close()
}
