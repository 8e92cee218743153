// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/publish/archive"
)

// convert does what `thaw convert` does with an archive.
func (n *node) convert(path, temp, tag string, opts archive.Options) error {
	opts.TempDir = temp
	a, err := archive.Open(n.t.Context(), path, opts)
	if err != nil {
		return err
	}
	_, err = publish.Publish(n.t.Context(), a.Source, publish.Target{Reference: n.registry.Ref("cp/converted:" + tag)})
	return errors.Join(err, a.Close())
}

// TestArchiveTricks: each archive is refused with its own message, and leaves nothing.
func TestArchiveTricks(t *testing.T) {
	n := newNode(t)
	p, err := os.ReadFile(dump)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := ReadArchive(p)
	if err != nil {
		t.Fatal(err)
	}
	opts := archive.Options{Base: n.base, MaxSize: 64 << 20}
	file := filepath.Join(t.TempDir(), "archive")
	if err := os.WriteFile(file, Tar(entries), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.convert(file, t.TempDir(), "good", opts); err != nil {
		t.Fatalf("without a trick: %v", err)
	}
	messages := make(map[string]string)
	for _, trick := range ArchiveTricks() {
		t.Run(trick.Name, func(t *testing.T) {
			if err := os.WriteFile(file, trick.Make(entries), 0o600); err != nil {
				t.Fatal(err)
			}
			temp := t.TempDir()
			runtime.GC()
			peak(t)
			before := peak(t)
			begin := time.Now()
			err := n.convert(file, temp, trick.Name, opts)
			took, memory := time.Since(begin), peak(t)-before
			if err == nil {
				t.Fatal("it was not refused")
			}
			text := strings.ReplaceAll(err.Error(), n.registry.Ref("cp/converted:"+trick.Name), "REF")
			if !strings.Contains(text, trick.Says) || !plain(text) || len(text) > longest {
				t.Errorf("%q\nlacks %q, or is no plain line", text, trick.Says)
			}
			if other, ok := messages[text]; ok {
				t.Errorf("the same message as for %s: %s", other, text)
			}
			messages[text] = trick.Name
			if took > mostTime || memory > mostMemory {
				t.Errorf("%v and %d MiB", took, memory>>20)
			}
			t.Logf("%v, %d MiB: %s", took.Round(time.Millisecond), memory>>20, text)
			if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
			if _, err := Pull(t.Context(), n.registry.Ref("cp/converted:"+trick.Name)); err == nil {
				t.Error("an image was pushed")
			}
		})
	}
	for _, base := range HostileBases() {
		if err := os.WriteFile(file, Tar(entries), 0o600); err != nil {
			t.Fatal(err)
		}
		err := n.convert(file, t.TempDir(), "base", archive.Options{Base: base})
		if err == nil || !plain(err.Error()) || !strings.Contains(err.Error(), "is no image reference") {
			t.Errorf("base %q: %v", base, err)
		}
	}
}
