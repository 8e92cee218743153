// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// A restore is checked twice with the same images and spec: before there is a
// root filesystem, and in it. The second refusal reads as the first.
func TestAdmit(t *testing.T) {
	n := newNode(t)
	n.stop()
	var asked []string
	n.opts.Admit = func(_ context.Context, images, rootfs string, filter []byte, spec *specs.Spec) error {
		if images == "" || spec == nil {
			t.Error("without images or spec")
		}
		asked = append(asked, rootfs+string(filter))
		if rootfs == "/bad" {
			return fmt.Errorf("file /a is a link: %w", errdefs.ErrFailedPrecondition)
		}
		return nil
	}
	n.start()
	n.push(newSample(t))
	resp, err := n.prepare("c", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.manager.Admit(t.Context(), resp.RestoreId, "/good", []byte("+filter")); err != nil {
		t.Error(err)
	}
	err = n.manager.Admit(t.Context(), resp.RestoreId, "/bad", nil)
	if !errdefs.IsFailedPrecondition(err) || !strings.HasPrefix(err.Error(), "restore of "+resp.Image+": file /a is a link") {
		t.Errorf("error %v", err)
	}
	if got := strings.Join(asked, " "); got != " /good+filter /bad" {
		t.Errorf("asked with root filesystems %q", got)
	}
	if err := n.manager.Admit(t.Context(), resp.RestoreId, "", nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("no root filesystem: %v", err)
	}
	if err := n.manager.Admit(t.Context(), "k8s.io/other", "/good", nil); !errdefs.IsNotFound(err) {
		t.Errorf("unknown restore: %v", err)
	}
}
