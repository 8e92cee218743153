// SPDX-License-Identifier: Apache-2.0

package lazypages

import (
	"os"
	"path/filepath"
	"testing"

	"thaw.dev/thaw/test/stranger"
)

// TestStranger: who is no process of this user neither hands anything over nor takes CRIU's place.
func TestStranger(t *testing.T) {
	dir := t.TempDir()
	l, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, SocketName)
	if info, err := os.Stat(path); err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	result := make(chan error)
	go func() { result <- l.Serve(t.Context(), &record{}) }()
	stranger.Refused(t, "unix", path)
	c := dial(t, dir)
	defer c.Close()
	send(t, c, finished)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Error(err)
	}
}
