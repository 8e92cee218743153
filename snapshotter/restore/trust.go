// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"errors"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/snapshotter/api"
)

// prepareVerified makes a restore while the verifiers are asked about its image. The first of
// both that fails ends the other.
func (m *Manager) prepareVerified(ctx context.Context, req *api.PrepareRequest, spec *specs.Spec, w *wish, manifest v1.Descriptor) (*restored, error) {
	if !m.opts.Trust.Verifies() {
		return m.prepare(ctx, req, spec, w, manifest, func() error { return nil })
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	var verdict error
	done := make(chan struct{})
	go func() {
		defer close(done)
		vctx, span := startSpan(ctx, "Verify")
		defer span.End()
		if verdict = m.opts.Trust.Verify(vctx, w.image, w.target); verdict != nil {
			end()
		}
	}()
	r, err := m.prepare(ctx, req, spec, w, manifest, func() error {
		<-done
		return verdict
	})
	end()
	<-done
	if verdict != nil && !errors.Is(verdict, context.Canceled) {
		return nil, verdict // because of which prepare was ended
	}
	return r, err
}
