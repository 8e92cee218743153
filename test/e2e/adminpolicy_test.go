// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// verifiers is configuration for a verifier that is a shell script.
func verifiers(t *testing.T, script string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "verifier"), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("[trust]\nverifiers_dir = %q\n", dir)
}

// TestTrust: what an admin allows is restored, and everything else is refused in one line. What is checked is the index that is
// restored, not the tag.
func TestTrust(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline)
	ref, before := frozen(ctx, t, s, workloads.Pipeline)
	parsed, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	head, err := remote.Head(parsed, remote.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	digest := head.Digest.String()
	repository := strings.TrimSuffix(ref, ":"+parsed.Identifier())
	t.Cleanup(func() {
		if err := s.RestartDaemon(context.Background(), ""); err != nil {
			t.Error(err)
		}
	})
	with := func(t *testing.T, config string) {
		t.Helper()
		if err := s.RestartDaemon(ctx, config); err != nil {
			t.Fatal(err)
		}
	}
	restores := func(t *testing.T, ref string) {
		t.Helper()
		pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{Annotations: map[string]string{"thaw.dev/restore": "required"}})
		observed(ctx, t, workloads.Pipeline, before, pod, c)
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
	}
	refuses := func(t *testing.T, ref string, words ...string) {
		t.Helper()
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{}), append(words, "may not be restored", "in thaw's configuration")...)
	}

	t.Run("repositories", func(t *testing.T) {
		with(t, "[trust]\nrepositories = [\"registry.example/*\"]\n")
		refuses(t, ref, ref, digest, "trust.repositories", repository)
		with(t, fmt.Sprintf("[trust]\nrepositories = [%q]\n", repository))
		restores(t, ref)
	})
	t.Run("digest", func(t *testing.T) {
		with(t, "[trust]\nrequire_digest = true\n")
		refuses(t, ref, ref, "trust.require_digest", repository+"@"+digest)
		restores(t, repository+"@"+digest)
		restores(t, ref+"@"+digest)
	})
	t.Run("verifiers", func(t *testing.T) {
		with(t, verifiers(t, `[ "$2 $4" = "`+ref+" "+digest+`" ] || { echo "no signature of $4"; exit 1; }`))
		restores(t, ref)
		// The tag moves: its new index is another that nobody signed.
		f := takeApart(ctx, t, ref)
		f.config.Container.Name = "moved"
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
		moved := f.push(ctx, t, parsed.Identifier())
		if _, err := s.Pull(ctx, moved, nil); err != nil {
			t.Fatal(err)
		}
		head, err := remote.Head(parsed, remote.WithContext(ctx))
		if err != nil || head.Digest.String() == digest {
			t.Fatalf("the tag has not moved: %v", err)
		}
		refuses(t, ref, ref, head.Digest.String(), "no signature of "+head.Digest.String(), "trust.verifiers_dir")
	})
}
