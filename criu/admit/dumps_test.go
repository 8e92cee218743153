// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu/image"
)

// TestRealDumps checks dumps of ordinary containers against the specs that they
// ran under. THAW_DUMPS names a folder with, for each, images/ and config.json.
func TestRealDumps(t *testing.T) {
	folder := os.Getenv("THAW_DUMPS")
	if folder == "" {
		t.Skip("THAW_DUMPS names no folder of dumps")
	}
	dumps, err := filepath.Glob(filepath.Join(folder, "*", "images"))
	if err != nil || len(dumps) == 0 {
		t.Fatalf("no dumps in %s: %v", folder, err)
	}
	for _, path := range dumps {
		t.Run(filepath.Base(filepath.Dir(path)), func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join(filepath.Dir(path), "config.json"))
			if err != nil {
				t.Fatal(err)
			}
			var spec specs.Spec
			if err := json.Unmarshal(raw, &spec); err != nil {
				t.Fatal(err)
			}
			d, err := image.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			if err := Check(d, &spec, Options{}); err != nil {
				t.Error(err)
			}
		})
	}
}
