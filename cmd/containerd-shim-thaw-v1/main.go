// SPDX-License-Identifier: Apache-2.0

// containerd-shim-thaw-v1 is the containerd runtime shim of thaw. containerd
// starts it by its name for runtime_type io.containerd.thaw.v1.
package main

import (
	"context"

	"github.com/containerd/containerd/v2/pkg/shim"

	thaw "thaw.dev/thaw/shim"
	"thaw.dev/thaw/shim/guard"
	"thaw.dev/thaw/shim/profile"
)

func main() {
	guard.Main()
	profile.Main()
	thaw.Register()
	shim.RunShim(context.Background(), thaw.NewManager())
}
