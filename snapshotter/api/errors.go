// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ToStatus turns an error into an RPC status with the code of its errdefs class
// and a message of one printable line. Whoever passes it on
// shows exactly that line: containerd adds to errors that carry details, and what
// an image or a registry says must not break the line of an event.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(code(err), Line(err.Error()))
}

func code(err error) codes.Code {
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return status.Code(errgrpc.ToGRPC(err))
}

// FromStatus is the reverse of ToStatus: an error with the status's message that is of
// the errdefs class of its code. Other errors pass unchanged.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	return classed{line: s.Message(), class: errdefs.Resolve(errgrpc.ToNative(status.Error(s.Code(), "")))}
}

type classed struct {
	line  string
	class error
}

func (e classed) Error() string { return e.line }
func (e classed) Unwrap() error { return e.class }

// Line makes one line of a text: what is not printable, such as line breaks and
// what turns the direction of text around, becomes spaces. The name of an error's class at the end, of use to programs only,
// goes.
func Line(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	text = strings.Join(strings.Fields(text), " ")
	for _, class := range []error{
		errdefs.ErrInvalidArgument, errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrFailedPrecondition,
		errdefs.ErrUnavailable, errdefs.ErrDataLoss, errdefs.ErrResourceExhausted, errdefs.ErrPermissionDenied, errdefs.ErrUnauthenticated,
	} {
		text = strings.TrimSuffix(text, ": "+class.Error())
	}
	return text
}
