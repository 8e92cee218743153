// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"errors"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// mostMemory is what an image may take of the daemon, in bytes, beyond what it has anyway.
	mostMemory = 256 << 20
	// mostTime is what it may take, on a machine that has much else to do. The longest by far unpack up to the limits.
	mostTime = time.Minute
	// longest is how long a message may be, in bytes.
	longest = 1500
)

// TestTricks: each image is refused with its own message, in bounded time and memory, and leaves nothing.
func TestTricks(t *testing.T) {
	n := newNode(t)
	source := n.publish()
	good, err := source.Image()
	if err != nil {
		t.Fatal(err)
	}
	p, err := source.Push(t.Context(), good, "again")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.try(p, nil); err != nil {
		t.Fatalf("without a trick: %v", err)
	}
	tricks := Tricks()
	t.Logf("%d tricks", len(tricks))
	if len(tricks) < 60 {
		t.Errorf("%d tricks", len(tricks))
	}
	goroutines := runtime.NumGoroutine()
	defer func() {
		// Connections to the registry have some each.
		if more := runtime.NumGoroutine() - goroutines; more > 50 {
			t.Errorf("%d goroutines are left", more)
		}
	}()
	names, messages := make(map[string]bool), make(map[string]string)
	for _, trick := range tricks {
		if names[trick.Name] {
			t.Errorf("%s: name used twice", trick.Name)
		}
		names[trick.Name] = true
		t.Run(trick.Name, func(t *testing.T) {
			i, err := source.Image()
			if err != nil {
				t.Fatal(err)
			}
			trick.Make(i)
			p, err := source.Push(t.Context(), i, trick.Name)
			if err != nil {
				t.Fatal(err)
			}
			i = nil
			runtime.GC()
			there := n.left()
			peak(t)
			before := peak(t)
			begin := time.Now()
			late, err := n.try(p, trick.Pod)
			took, memory := time.Since(begin), peak(t)-before
			if err == nil {
				t.Fatal("it was not refused")
			}
			text := strings.TrimPrefix(err.Error(), "restore of "+p.Reference+": ")
			if !strings.Contains(text, trick.Says) || late != trick.Late {
				t.Errorf("late %v: %s\nlacks %q", late, text, trick.Says)
			}
			if !plain(text) || len(text) > longest {
				t.Errorf("no plain line: %q", text)
			}
			if other, ok := messages[text]; ok {
				t.Errorf("the same message as for %s: %s", other, text)
			}
			messages[text] = trick.Name
			if !classed(err) {
				t.Errorf("error of no class: %v", err)
			}
			if took > mostTime || memory > mostMemory {
				t.Errorf("%v and %d MiB", took, memory>>20)
			}
			t.Logf("%v, %d MiB: %s", took.Round(time.Millisecond), memory>>20, text)
			for _, path := range n.left() {
				if !slices.Contains(there, path) && !(late && strings.HasPrefix(path, filepath.Join(n.cache, "pages"))) {
					t.Errorf("left: %s", path)
				}
			}
			if open := n.settled(); len(open) > 0 {
				t.Errorf("left open: %v", open)
			}
			if list := n.manager.List(); len(list) > 0 {
				t.Errorf("left: %v", list)
			}
		})
	}
}

// classed reports whether an error travels over RPC as what it is.
func classed(err error) bool {
	for _, is := range []func(error) bool{errdefs.IsDataLoss, errdefs.IsFailedPrecondition, errdefs.IsResourceExhausted, errdefs.IsNotFound, errdefs.IsUnavailable, errdefs.IsPermissionDenied} {
		if is(err) {
			return true
		}
	}
	return errors.Is(err, errdefs.ErrUnknown)
}
