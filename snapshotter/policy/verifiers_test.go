// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

var index = v1.Descriptor{MediaType: v1.MediaTypeImageIndex, Digest: here, Size: 7}

const image = "registry.example/agents/warm:1"

// verifying makes a policy with shell scripts as its verifiers, by name. Each runs in a folder of the test's.
func verifying(t *testing.T, scripts map[string]string) (p *Policy, dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, script := range scripts {
		write(t, dir, name, script)
	}
	p, err := New(Options{VerifiersDir: dir, VerdictLifetime: time.Hour})
	if err != nil || !p.Verifies() {
		t.Fatal(err)
	}
	return p, dir
}

func write(t *testing.T, dir, name, script string) {
	t.Helper()
	// Not in place: a program that runs cannot be written.
	made := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(made, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(made, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func asked(t *testing.T, log string) int {
	t.Helper()
	p, err := os.ReadFile(log)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Count(string(p), "\n")
}

func TestVerdicts(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	p, dir := verifying(t, map[string]string{
		"one": `echo "$@" >>` + log + `; cat >` + log + `.stdin`,
		"two": `[ "$2" != registry.example/agents/bad:1 ] || { printf 'no signature\nforged \033[2Jline'; exit 3; }`,
	})
	verify := func(name string) error { return p.Verify(t.Context(), name, index) }
	if err := verify(image); err != nil {
		t.Fatal(err)
	}
	got, _ := os.ReadFile(log)
	stdin, _ := os.ReadFile(log + ".stdin")
	if want := "-name " + image + " -digest " + string(here) + " -stdin-media-type application/vnd.oci.descriptor.v1+json\n"; string(got) != want {
		t.Errorf("called with %q, want %q", got, want)
	}
	if !strings.Contains(string(stdin), string(here)) || !strings.Contains(string(stdin), v1.MediaTypeImageIndex) {
		t.Errorf("stdin is %q", stdin)
	}

	// What was accepted is accepted without asking again, for that name and digest, and for so long.
	if err := verify(image); err != nil || asked(t, log) != 1 {
		t.Errorf("%v, asked %d times", err, asked(t, log))
	}
	if err := verify("registry.example/other:1"); err != nil || asked(t, log) != 2 {
		t.Errorf("%v, asked %d times", err, asked(t, log))
	}
	p.verifiers.now = func() time.Time { return time.Now().Add(59 * time.Minute) }
	if err := verify(image); err != nil || asked(t, log) != 2 {
		t.Errorf("%v, asked %d times", err, asked(t, log))
	}
	p.verifiers.now = func() time.Time { return time.Now().Add(61 * time.Minute) }
	if err := verify(image); err != nil || asked(t, log) != 3 {
		t.Errorf("%v, asked %d times", err, asked(t, log))
	}

	// A refusal is one plain line, and not remembered.
	for range 2 {
		err := verify("registry.example/agents/bad:1")
		says(t, err, "registry.example/agents/bad:1", string(here), "may not be restored", "trust.verifiers_dir", "verifier two rejected", `no signature\nforged`, "sign")
		if !errdefs.IsPermissionDenied(err) {
			t.Errorf("class of %v", err)
		}
	}
	if n := asked(t, log); n != 5 {
		t.Errorf("asked %d times", n)
	}

	// Other verifiers, other verdicts.
	write(t, dir, "two", "echo revoked; exit 1")
	says(t, verify(image), "revoked")
	write(t, dir, "two", "exit 0")
	write(t, dir, "three", "exit 1")
	says(t, verify(image), "verifier three rejected")
}

func TestNoVerdict(t *testing.T) {
	p, dir := verifying(t, map[string]string{"one": "kill -9 $$"})
	err := p.Verify(t.Context(), image, index)
	says(t, err, "no verdict", dir, "one", "log")
	if !errdefs.IsUnavailable(err) {
		t.Errorf("class of %v", err)
	}
	for _, c := range []struct {
		change func() error
		want   string
	}{
		{func() error { return os.Chmod(filepath.Join(dir, "one"), 0o722) }, "chmod go-w"},
		{func() error { return os.Chown(filepath.Join(dir, "one"), 1000, 0) }, "chown root"},
		{func() error { return os.Remove(filepath.Join(dir, "one")) }, "has no verifier"},
		{func() error { return os.Symlink("/nowhere", filepath.Join(dir, "one")) }, "no such file"},
		{func() error { return os.RemoveAll(dir) }, "make the folder"},
	} {
		if err := c.change(); err != nil {
			t.Fatal(err)
		}
		says(t, p.Verify(t.Context(), image, index), "trust.verifiers_dir", c.want)
	}
}

// TestVerifiersVanish: a folder that is emptied while they run is no consent.
func TestVerifiersVanish(t *testing.T) {
	p, _ := verifying(t, map[string]string{"one": `rm "$0"`})
	says(t, p.Verify(t.Context(), image, index), "has no verifier")
	p, _ = verifying(t, map[string]string{"one": `touch "$0"`})
	says(t, p.Verify(t.Context(), image, index), "changed meanwhile", "try again")
}

// TestManyAtOnce: restores of one image ask once, and one of them that gives up does not decide for the others.
func TestManyAtOnce(t *testing.T) {
	dir := t.TempDir()
	started, gate := filepath.Join(dir, "started"), filepath.Join(dir, "gate")
	for _, fifo := range []string{started, gate} {
		if err := unix.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// A verifier that runs says so, to somebody who must be there, and waits.
	p, _ := verifying(t, map[string]string{"one": "echo x >" + started + "; read x <" + gate})
	awaitStart := func() {
		t.Helper()
		if _, err := os.ReadFile(started); err != nil {
			t.Fatal(err)
		}
	}
	first, giveUp := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() { gone <- p.Verify(first, image, index) }()
	awaitStart()
	var others sync.WaitGroup
	for range 20 {
		others.Go(func() {
			if err := p.Verify(t.Context(), image, index); err != nil {
				t.Error(err)
			}
		})
	}
	giveUp()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("who gave up got %v", err)
	}
	awaitStart()
	if err := os.WriteFile(gate, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	others.Wait()
}

func TestBounded(t *testing.T) {
	v := newVerifiers(t.TempDir(), time.Hour)
	for i := range 3 * maxVerdicts {
		q := question{name: strings.Repeat("x", i)}
		a, mine := v.claim(q)
		if !mine {
			t.Fatal(i)
		}
		v.settle(q, a, nil, false, time.Now().Add(time.Hour))
	}
	if len(v.verdicts) > maxVerdicts {
		t.Errorf("%d verdicts", len(v.verdicts))
	}
}

// BenchmarkAccepted is what rules cost a restore whose image was accepted before.
func BenchmarkAccepted(b *testing.B) {
	dir := b.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "one"), []byte("#!/bin/sh\n"), 0o700); err != nil {
		b.Fatal(err)
	}
	p, err := New(Options{Repositories: []string{"registry.example/agents/*"}, VerifiersDir: dir, VerdictLifetime: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := errors.Join(p.Admits(image, here), p.Verify(b.Context(), image, index)); err != nil {
			b.Fatal(err)
		}
	}
}
