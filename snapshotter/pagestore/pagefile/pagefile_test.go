// SPDX-License-Identifier: Apache-2.0

package pagefile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestSound(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"data", BootFile} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, 8192), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(filepath.Join(dir, "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Sound(f, 8192); err != nil {
		t.Error(err)
	}
	for _, size := range []int64{8191, 0, 8193} {
		if err := os.Truncate(f.Name(), size); err != nil {
			t.Fatal(err)
		}
		if Sound(f, 8192) == nil {
			t.Errorf("%d bytes instead of 8192 passed", size)
		}
	}
	for range 2 {
		if err := Condemn(f.Name()); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, BootFile)); !os.IsNotExist(err) {
		t.Errorf("not condemned: %v", err)
	}
}

// BenchmarkSound is what each copy of pages costs more.
func BenchmarkSound(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "data"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	for b.Loop() {
		if err := Sound(f, 0); err != nil {
			b.Fatal(err)
		}
	}
}
