// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestFarewell(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "stderr")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := farewell(pipe, "nobody reads"); !errors.Is(err, unix.ENXIO) {
		t.Errorf("without a reader: %v", err)
	}
	r, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := farewell(pipe, "good bye"); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 100)
	if n, err := r.Read(p); err != nil || string(p[:n]) != "good bye\n" {
		t.Errorf("%q, %v", p[:n], err)
	}
	if err := farewell(pipe, strings.Repeat("x", 2*maxFarewell)); err != nil {
		t.Fatal(err)
	}
	p = make([]byte, 2*maxFarewell)
	if n, err := r.Read(p); err != nil || n != maxFarewell || p[n-1] != '\n' {
		t.Errorf("%d bytes, %v", n, err)
	}
	// A reader that does not read keeps nobody waiting, and gets no half line.
	for err = nil; err == nil; {
		err = farewell(pipe, strings.Repeat("x", 1000))
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Errorf("full: %v", err)
	}
	// A file may be one that the container could not write to.
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, "", "binary:///bin/logger?id=x"} {
		if err := farewell(path, "good bye"); err != nil {
			t.Errorf("%q: %v", path, err)
		}
	}
	if p, err := os.ReadFile(file); err != nil || len(p) != 0 {
		t.Errorf("file: %q, %v", p, err)
	}
}
