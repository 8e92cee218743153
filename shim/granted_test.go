// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"os"
	"testing"
)

// A container counts as started only if its first process was among those that are what the spec grants.
func TestVerified(t *testing.T) {
	looked := func(err error, pids ...int) *restored {
		c := &restored{cgroups: []string{"/x"}, looked: verdict{known: make(chan struct{}), pids: pids}}
		c.endVerify(err)
		c.endVerify(errNotVerified) // comes too late
		return c
	}
	wrong := errors.New("wrong")
	if err := looked(nil, 7, os.Getpid()).verified(t.Context(), os.Getpid()); err != nil {
		t.Error(err)
	}
	if err := looked(wrong, os.Getpid()).verified(t.Context(), os.Getpid()); !errors.Is(err, wrong) {
		t.Errorf("error %v", err)
	}
	if err := looked(nil, 7).verified(t.Context(), os.Getpid()); err == nil {
		t.Error("a process elsewhere is the container's first")
	}
	if err := looked(nil).verified(t.Context(), 1<<22); err != nil { // above any PID: it has ended
		t.Error(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (&restored{looked: verdict{known: make(chan struct{})}}).verified(ended, 1); !errors.Is(err, errNotVerified) {
		t.Errorf("error %v", err)
	}
}
