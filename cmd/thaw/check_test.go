// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestLookIn(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	for path, mode := range map[string]os.FileMode{filepath.Join(first, "criu"): 0o600, filepath.Join(second, "criu"): 0o700} {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for environ, want := range map[string]string{
		"A=b\x00PATH=.:" + first + ":" + second + "\x00": filepath.Join(second, "criu"),
		"PATH=" + first + "\x00":                         "",
		"A=b\x00":                                        "",
	} {
		if got, err := lookIn(environ, "criu"); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", environ, got, err)
		}
	}
}
