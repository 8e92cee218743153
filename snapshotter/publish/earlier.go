// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/log"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/snapshotter/pageblob"
)

// earlier is what is known of earlier checkpoints.
type earlier struct {
	known        pageblob.Known
	repositories map[digest.Digest][]string // that have a page blob
}

// earlier collects the chunks of earlier checkpoints. Those that were asked for
// must be readable; those that are only likely to help need not.
func (u *uploader) earlier(ctx context.Context, ref name.Tag, src *Source, asked []string) (*earlier, error) {
	e := &earlier{repositories: make(map[digest.Digest][]string)}
	likely := []string{ref.String()}
	if src.Base.Reference != "" && src.Base.Reference != ref.String() {
		likely = append(likely, src.Base.Reference)
	}
	for _, s := range asked {
		if err := e.add(ctx, u, s); err != nil {
			return nil, fmt.Errorf("memory of %s cannot be reused: %w", s, err)
		}
	}
	for _, s := range likely {
		if slices.Contains(asked, s) {
			continue
		}
		if err := e.add(ctx, u, s); err != nil {
			log.G(ctx).WithError(err).Debugf("no earlier checkpoint in %s", s)
		}
	}
	return e, nil
}

func (e *earlier) add(ctx context.Context, u *uploader, s string) error {
	ref, err := name.ParseReference(s)
	if err != nil {
		return err
	}
	img, err := read(ref, u.pull)
	if err != nil {
		return err
	}
	x, err := img.PageIndex(ctx)
	if err != nil {
		return err
	}
	for _, b := range x.Blobs {
		e.known.Add(b)
		e.repositories[b.Digest] = append(e.repositories[b.Digest], ref.Context().Name())
	}
	return nil
}
