// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"io"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/seal"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

// mediaType is a layer's media type.
func mediaType(plain string, encrypted bool) string {
	if encrypted {
		return plain + checkpoint.EncryptedSuffix
	}
	return plain
}

// uploadState uploads the state, encrypted if there is an envelope.
func (u *uploader) uploadState(ctx context.Context, files []stateFile, envelope *wrap.Envelope) (v1.Descriptor, error) {
	if envelope == nil {
		return u.stream(ctx, checkpoint.MediaTypeState, func(w io.Writer) error { return writeState(w, files) })
	}
	desc, err := u.stream(ctx, mediaType(checkpoint.MediaTypeState, true), func(w io.Writer) error {
		s, err := seal.NewWriter(w, envelope.Key, seal.State)
		if err != nil {
			return err
		}
		if err := writeState(s, files); err != nil {
			return err
		}
		return s.Close()
	})
	desc.Annotations = envelope.Annotations
	return desc, err
}

// uploadIndex uploads an encoded page index, encrypted if there is an envelope.
func (u *uploader) uploadIndex(ctx context.Context, p []byte, mem memory, envelope *wrap.Envelope) (v1.Descriptor, error) {
	if envelope == nil {
		return u.bytes(ctx, checkpoint.MediaTypePageIndex, p)
	}
	p, err := seal.Bytes(seal.JoinKeys(mem.keys, p), envelope.Key, seal.PageIndex)
	if err != nil {
		return v1.Descriptor{}, err
	}
	desc, err := u.bytes(ctx, mediaType(checkpoint.MediaTypePageIndex, true), p)
	desc.Annotations = envelope.Annotations
	return desc, err
}
