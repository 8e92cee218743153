// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"

	"thaw.dev/thaw/snapshotter/api"
)

// maxErrorBody bounds what is read of the body of a failed response.
const maxErrorBody = 8 << 10

// Error is why one host did not deliver. It never holds a URL: those of blob
// storage carry signatures.
type Error struct {
	// Host is the registry or mirror that was asked.
	Host string
	// Status is the HTTP status; 0 when there was no answer.
	Status int
	// Cause says what was wrong, in one line.
	Cause string
	// Remedy says what to do; may be empty.
	Remedy string

	class     error // of errdefs
	temporary bool
	wrapped   error
}

func (e *Error) Error() string {
	s := e.Host + ": " + e.Cause
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s
}

// Unwrap returns the errdefs class and the error from below.
func (e *Error) Unwrap() []error {
	errs := []error{e.class}
	if e.wrapped != nil {
		errs = append(errs, e.wrapped)
	}
	return errs
}

// Temporary reports whether the same request may succeed later.
func (e *Error) Temporary() bool { return e.temporary }

// transportError classes an error of http.Client.
func transportError(host string, err error) *Error {
	e := &Error{Host: host, class: errdefs.ErrUnavailable, temporary: true}
	var uerr *url.Error
	if errors.As(err, &uerr) {
		err = uerr.Err // without the URL
	}
	e.Cause, e.wrapped = oneLine(err.Error()), err
	var (
		dns  *net.DNSError
		cert *tls.CertificateVerificationError
		rec  tls.RecordHeaderError
	)
	switch {
	case errors.Is(err, errStalled):
		e.Cause = errStalled.Error()
	case errors.As(err, &cert):
		e.temporary = false
		e.Remedy = "add the registry's CA to hosts.toml in containerd's certs.d"
	case errors.As(err, &rec):
		e.temporary = false
		e.Remedy = "the host does not speak TLS: give it an http:// server in hosts.toml in containerd's certs.d"
	case errors.As(err, &dns):
		e.Remedy = "check the node's name resolution and the image's name"
	case errors.Is(err, docker.ErrInvalidAuthorization):
		e.class, e.temporary = errdefs.ErrUnauthenticated, false
		e.Remedy = remedyCredentials
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
	default:
		e.Remedy = "check that the registry runs and that the node reaches it"
	}
	return e
}

const remedyCredentials = "check the node's credentials for it: docker_config in thaw's configuration"

// statusError classes a response that is no success. It reads and closes the body.
func statusError(host string, resp *http.Response) *Error {
	code := errorCode(resp)
	e := &Error{Host: host, Status: resp.StatusCode, Cause: fmt.Sprintf("HTTP status %d %s%s", resp.StatusCode, http.StatusText(resp.StatusCode), code)}
	switch s := resp.StatusCode; {
	case s == http.StatusUnauthorized:
		e.class, e.Remedy = errdefs.ErrUnauthenticated, remedyCredentials
	case s == http.StatusForbidden:
		e.class, e.Remedy = errdefs.ErrPermissionDenied, remedyCredentials
	case s == http.StatusNotFound, s == http.StatusGone:
		e.class, e.Remedy = errdefs.ErrNotFound, "push the checkpoint image again: the registry has lost a part of it"
	case s == http.StatusRequestedRangeNotSatisfiable:
		e.class, e.Remedy = errdefs.ErrDataLoss, "push the checkpoint image again: the registry's copy is shorter than it should be"
	case s == http.StatusTooManyRequests:
		e.class, e.temporary, e.Remedy = errdefs.ErrResourceExhausted, true, "the registry limits requests: use credentials with a higher limit, or a mirror"
	case s >= 500, s == http.StatusRequestTimeout, s == http.StatusTooEarly:
		e.class, e.temporary = errdefs.ErrUnavailable, true
	default:
		e.class = errdefs.ErrUnknown
	}
	return e
}

// errorCode returns the registry's own error code in parentheses, if it sent one
// (OCI distribution specification, "Error Codes").
func errorCode(resp *http.Response) string {
	p, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	resp.Body.Close()
	var body struct {
		Errors []struct {
			Code string `json:"code"`
		} `json:"errors"`
	}
	if json.Unmarshal(p, &body) != nil || len(body.Errors) == 0 {
		return ""
	}
	code := body.Errors[0].Code
	ok := func(c rune) bool { return c == '_' || c >= 'A' && c <= 'Z' }
	if code == "" || len(code) > 64 || strings.TrimFunc(code, ok) != "" {
		return ""
	}
	return " (" + code + ")"
}

// wrong is an answer that breaks the protocol or is not what was asked for.
func wrong(host, format string, args ...any) *Error {
	return &Error{Host: host, Status: http.StatusOK, class: errdefs.ErrDataLoss, Cause: fmt.Sprintf(format, args...)}
}

// failure joins what all hosts answered.
func failure(what string, errs []*Error) error {
	if len(errs) == 0 {
		return fmt.Errorf("%s: the node's registry configuration names no host that may be pulled from: %w", what, errdefs.ErrFailedPrecondition)
	}
	f := &fetchError{what: what}
	for _, e := range errs {
		f.errs = append(f.errs, e)
	}
	return f
}

type fetchError struct {
	what string
	errs []error
}

func (f *fetchError) Error() string {
	texts := make([]string, len(f.errs))
	for i, e := range f.errs {
		texts[i] = e.Error()
	}
	return f.what + " from registry " + strings.Join(texts, "; ")
}

// Unwrap has the last host first: that is the registry itself, whose answer
// classes the failure; mirrors come before it.
func (f *fetchError) Unwrap() []error {
	errs := make([]error, 0, len(f.errs))
	for i := len(f.errs) - 1; i >= 0; i-- {
		errs = append(errs, f.errs[i])
	}
	return errs
}

// oneLine keeps a text that others wrote from breaking lines or terminals.
func oneLine(s string) string {
	const limit = 300
	if s = api.Line(s); len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}
