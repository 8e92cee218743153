// SPDX-License-Identifier: Apache-2.0

package criulog

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestKeep(t *testing.T) {
	dir, work := filepath.Join(t.TempDir(), "logs"), t.TempDir()
	write := func(path string, age time.Duration) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("log"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range keep {
		write(filepath.Join(dir, fmt.Sprintf("c%02d", i), Restore), time.Duration(i+1)*time.Hour)
	}
	// What others put there is theirs.
	write(filepath.Join(dir, "other", "file"), 1000*time.Hour)
	write(filepath.Join(dir, "shared", Dump), 1000*time.Hour)
	write(filepath.Join(dir, "shared", "file"), 1000*time.Hour)
	write(filepath.Join(work, Restore), 0)

	kept, err := Keep(dir, "new", work, Restore)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := os.ReadFile(kept); err != nil || string(p) != "log" || kept != filepath.Join(dir, "new", Restore) {
		t.Errorf("%s: %q, %v", kept, p, err)
	}
	for path, want := range map[string]bool{
		"c00/restore.log": true, "c62/restore.log": true, "c63": false,
		"other/file": true, "shared/file": true, "shared/dump.log": false,
	} {
		if _, err := os.Lstat(filepath.Join(dir, path)); (err == nil) != want {
			t.Errorf("%s: %v", path, err)
		}
	}

	// The next failure of the same container takes the place of the last.
	if again, err := Keep(dir, "new", work, Restore); err != nil || again != kept {
		t.Errorf("%s, %v", again, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*", "*.log")); len(left) != keep {
		t.Errorf("%d logs are left", len(left))
	}
	if _, err := Keep(dir, "new", work, Dump); err == nil {
		t.Error("a log that does not exist was kept")
	}
}
