// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestStatusIsOneLineAndKeepsItsClass(t *testing.T) {
	cause := errors.New("first\nsecond\x1b[31m\u202e\u2028é")
	err := ToStatus(fmt.Errorf("restore: %w: %w", cause, errdefs.ErrFailedPrecondition))
	s, _ := status.FromError(err)
	if s.Code() != codes.FailedPrecondition || s.Message() != "restore: first second [31m é" || len(s.Details()) != 0 {
		t.Errorf("%v %q %v", s.Code(), s.Message(), s.Details())
	}
	back := FromStatus(err)
	if !errdefs.IsFailedPrecondition(back) || back.Error() != s.Message() {
		t.Errorf("%v", back)
	}
	// A second hop changes nothing.
	if again, _ := status.FromError(ToStatus(back)); again.Code() != s.Code() || again.Message() != s.Message() {
		t.Errorf("%v", again)
	}
	if s, _ := status.FromError(ToStatus(cause)); s.Code() != codes.Unknown {
		t.Errorf("class of an error without one: %v", s.Code())
	}
	if ToStatus(nil) != nil || FromStatus(nil) != nil {
		t.Error("no error became one")
	}
	if err := FromStatus(cause); !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
}
