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
	"time"

	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
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
	// after is how long the host asked to wait.
	after time.Duration
	// oddity is an answer that no registry gives for long, but what is between may
	// give once: it becomes final when it comes again.
	oddity bool
	// stale may be for what this node knows of the host, such as a token: the same
	// request may succeed when that was read anew.
	stale bool
	// hasty is a last attempt that had little time: why the one before failed says more.
	hasty bool
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
	case errors.Is(err, errStalled), errors.Is(err, errSlow):
		e.Remedy = "check the load of the registry and the network to it"
	case errors.As(err, &cert):
		e.temporary, e.stale = false, true
		e.Remedy = "add the registry's CA to hosts.toml in containerd's certs.d"
	case errors.As(err, &rec):
		e.temporary = false
		e.Remedy = "the host does not speak TLS: give it an http:// server in hosts.toml in containerd's certs.d"
	case errors.As(err, &dns):
		e.Remedy = "check the node's name resolution and the image's name"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
	default:
		e.Remedy = "check that the registry runs and that the node reaches it"
	}
	return e
}

// tokenError classes an error of an authorizer, which goes on to give the same
// error whatever its reason was.
func tokenError(host string, err error) *Error {
	e := transportError(host, err)
	e.stale = true
	if st, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		e.Cause = fmt.Sprintf("the token server answered HTTP status %d %s", st.StatusCode, http.StatusText(st.StatusCode))
		e.temporary, e.Remedy = passing(st.StatusCode), remedyTrouble
		if !e.temporary {
			e.class, e.Remedy = errdefs.ErrUnauthenticated, remedyCredentials
		}
		return e
	}
	e.Cause = "no token: " + e.Cause
	return e
}

// passing reports whether a status may be another one soon.
func passing(status int) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusRequestTimeout, http.StatusTooEarly:
		return true
	}
	return status >= 500
}

const (
	remedyCredentials = "check the node's credentials for it: docker_config in thaw's configuration"
	remedyTrouble     = "look at the registry's log, or name a mirror in hosts.toml in containerd's certs.d"
)

// statusError classes a response that is no success. It reads and closes the body.
func statusError(host string, resp *http.Response) *Error {
	code := errorCode(resp)
	e := &Error{
		Host: host, Status: resp.StatusCode, temporary: passing(resp.StatusCode), Remedy: remedyTrouble,
		Cause: fmt.Sprintf("HTTP status %d %s%s", resp.StatusCode, http.StatusText(resp.StatusCode), code),
	}
	if e.temporary {
		e.after = parseRetryAfter(resp.Header.Get("Retry-After"))
	}
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
		e.class, e.Remedy = errdefs.ErrResourceExhausted, "the registry limits requests: use credentials with a higher limit, or a mirror"
	case e.temporary:
		e.class = errdefs.ErrUnavailable
	default:
		e.class = errdefs.ErrUnknown
	}
	return e
}

// storageError classes an answer of the storage that a host redirected to.
func storageError(host string, resp *http.Response) *Error {
	e := statusError(host, resp)
	e.Cause += " from the storage that it redirects to"
	switch e.Status {
	case http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden:
		// So stores refuse a signed address that has expired. The next one may not have.
		e.class, e.temporary = errdefs.ErrUnavailable, true
		e.Remedy = "check the registry's clock, and its credentials for the storage"
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
	return &Error{
		Host: host, Status: http.StatusOK, class: errdefs.ErrDataLoss, oddity: true,
		Cause: fmt.Sprintf(format, args...), Remedy: "look for a proxy that changes what the registry answers",
	}
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
