// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

func TestAnnotateChangesNothingElse(t *testing.T) {
	const criu = `"org.criu.config":"/run/thaw/criu.conf"`
	for in, want := range map[string]string{
		`{"ociVersion":"9.9","new":{"big":12345678901234567890},"annotations":{"a":"b"}}`: `{"annotations":{"a":"b",` + criu + `},"new":{"big":12345678901234567890},"ociVersion":"9.9"}`,
		`{"annotations":{"org.criu.config":"/evil.conf"}}`:                                `{"annotations":{` + criu + `}}`,
		`{}`: `{"annotations":{` + criu + `}}`,
	} {
		bundle := t.TempDir()
		path := filepath.Join(bundle, specFile)
		if err := os.WriteFile(path, []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := annotate(bundle, "/run/thaw/criu.conf"); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want || !json.Valid(got) {
			t.Errorf("%s became %s, %v", in, got, err)
		}
	}
	bundle := t.TempDir()
	for _, in := range []string{``, `[]`, `{"annotations":[]}`} {
		if err := os.WriteFile(filepath.Join(bundle, specFile), []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := annotate(bundle, "/x"); err == nil {
			t.Errorf("%q was taken for a spec", in)
		}
	}
}
