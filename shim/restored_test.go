// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"errors"
	"testing"
)

// TestCompleteWithoutPager: a checkpoint may be asked for when the fault handler could not be made.
func TestCompleteWithoutPager(t *testing.T) {
	c := &restored{paged: make(chan struct{}), pagerErr: errors.New("page store is gone")}
	close(c.paged)
	if err := c.complete(t.Context()); !errors.Is(err, c.pagerErr) {
		t.Errorf("complete: %v", err)
	}
}
