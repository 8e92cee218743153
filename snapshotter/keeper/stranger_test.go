// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"path/filepath"
	"testing"

	"thaw.dev/thaw/test/stranger"
)

func TestStranger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.sock")
	_, stop := serve(t, path)
	defer stop()
	stranger.Refused(t, "unixpacket", path)
}
