// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"thaw.dev/thaw/snapshotter/api"
)

// maxQuoted bounds in bytes what is quoted of a registry's answer.
const maxQuoted = 400

// explain puts what went wrong with a registry into one line with what to do
// about it. verb is push or pull.
func explain(verb string, ref name.Reference, err error) error {
	var te *transport.Error
	if errors.As(err, &te) {
		return fmt.Errorf("%s %s: %w", verb, ref, &answer{te, ref.Context().RegistryStr()})
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return fmt.Errorf("%s %s: the registry cannot be reached (%w): check its name and its hosts.toml", verb, ref, dns)
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return fmt.Errorf("%s %s: the registry cannot be reached (%w): check its name and its hosts.toml", verb, ref, op)
	}
	return fmt.Errorf("%s %s: %w", verb, ref, err)
}

// answer is an error that a registry answered, in one line.
type answer struct {
	cause *transport.Error
	host  string
}

func (a *answer) Unwrap() error { return a.cause }

func (a *answer) Error() string {
	code := a.cause.StatusCode
	said := fmt.Sprintf("the registry answers %d %s", code, http.StatusText(code))
	for _, d := range a.cause.Errors {
		said += ": " + api.Line(d.String())
	}
	if len(said) > maxQuoted {
		said = said[:maxQuoted] + "..."
	}
	switch code {
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Sprintf("%s: log in, e.g. docker login %s, or set DOCKER_CONFIG", said, a.host)
	case http.StatusNotFound:
		return said + ": there is no such image"
	case http.StatusRequestEntityTooLarge:
		return said + ": a layer is larger than the registry takes"
	}
	return said
}
