// SPDX-License-Identifier: Apache-2.0

//go:build linux

package baseline

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/restore"
)

// limits are large enough for everything that is measured.
var limits = restore.Limits{MaxMemory: 64 << 30, MaxState: 1 << 30, MaxPageIndex: 64 << 20}

// Unpack downloads a whole checkpoint image of a plain-HTTP registry and writes complete CRIU images to dir.
func Unpack(ctx context.Context, ref, dir string) error {
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		return err
	}
	index, err := remote.Get(parsed, remote.WithContext(ctx))
	if err != nil {
		return err
	}
	var parsedIndex v1.Index
	if err := json.Unmarshal(index.Manifest, &parsedIndex); err != nil {
		return fmt.Errorf("%s: %w", ref, err)
	}
	manifest, err := checkpoint.Find(&parsedIndex)
	if err != nil {
		return fmt.Errorf("%s: %w", ref, err)
	}
	client := registry.New(registry.Options{Hosts: registry.Hosts(ctx, registry.HostOptions{CertsDir: "/etc/containerd/certs.d", Connections: 4}), Timeout: time.Minute, StallTimeout: time.Minute})
	repo, err := client.Repository(ref)
	if err != nil {
		return err
	}
	defer repo.Close()
	return restore.UnpackAll(ctx, repo, manifest, dir, limits)
}
