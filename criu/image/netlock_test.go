// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"google.golang.org/protobuf/proto"
)

func TestSkipNetworkLock(t *testing.T) {
	found, err := filepath.Glob("testdata/*/inventory.img")
	if err != nil || len(found) == 0 {
		t.Fatalf("no real inventories: %v", err)
	}
	for _, path := range found {
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		skip := func(content []byte) ([]byte, error) {
			return dir(t, map[string][]byte{"inventory.img": content}).SkipNetworkLock()
		}
		after, err := skip(before)
		if err != nil {
			t.Fatal(err)
		}
		read := func(content []byte) *inventory.InventoryEntry {
			f, err := newFrames(path, content, magicInventory)
			if err != nil {
				t.Fatal(err)
			}
			e := &inventory.InventoryEntry{}
			if err := f.decode(e); err != nil || f.more() {
				t.Fatal(err)
			}
			return e
		}
		want, got := read(before), read(after)
		if got.GetNetworkLockMethod() != lockSkip || want.GetNetworkLockMethod() == lockSkip {
			t.Errorf("%s: method %d, it was %d", path, got.GetNetworkLockMethod(), want.GetNetworkLockMethod())
		}
		// Nothing else changes, fields that the bindings do not know included.
		want.NetworkLockMethod = got.NetworkLockMethod
		if !proto.Equal(want, got) {
			t.Errorf("%s: %v became %v", path, want, got)
		}
		for n := range before {
			if _, err := skip(before[:n]); !errors.Is(err, ErrFormat) {
				t.Fatalf("cut at %d: %v", n, err)
			}
		}
	}
}
