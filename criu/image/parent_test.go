// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"testing"
)

func TestEmptyParent(t *testing.T) {
	dir := t.TempDir()
	for name, content := range EmptyParent([]uint32{1, 4711}) {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	maps, err := d.Pagemaps()
	if err != nil {
		t.Fatal(err)
	}
	if len(maps) != 2 || maps[0].ID+maps[1].ID != 1+4711 {
		t.Errorf("%d pagemaps", len(maps))
	}
	for _, m := range maps {
		f, err := d.OpenPages(m)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if len(m.Ranges) != 0 || m.Size != 0 {
			t.Errorf("%+v", m)
		}
	}
}
