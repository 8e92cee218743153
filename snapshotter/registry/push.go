// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
)

// Transport is an http.RoundTripper for clients that speak to registries under
// the names that references have. It sends each request where the node's
// containerd would: to the hosts that certs.d/HOST/hosts.toml names with the
// capability needed, with the scheme, certificates and headers given there.
// Whoever uses it authenticates: an Authorization header is passed on to the
// hosts that hosts.toml names, and to no other.
//
// Requests to hosts that no reference names, such as token servers, go out as
// they are.
type Transport struct {
	hosts docker.RegistryHosts
	need  docker.HostCapabilities
	plain http.RoundTripper

	mu     sync.Mutex
	routes map[string][]route
}

// route is where the requests for one registry go.
type route struct {
	endpoint  docker.RegistryHost
	transport http.RoundTripper
}

// NewPushTransport returns a transport to the hosts that take pushes. It looks
// for hosts.toml files below certsDir, containerd's registry config_path, which
// may be missing or empty. Of several hosts the first is used for everything:
// what one of them has is no proof that another has it.
func NewPushTransport(ctx context.Context, certsDir string) *Transport {
	return newTransport(ctx, certsDir, docker.HostCapabilityPush)
}

// NewPullTransport returns a transport to the hosts that may be pulled from. A
// mirror that does not answer or lacks what is asked for is passed over.
func NewPullTransport(ctx context.Context, certsDir string) *Transport {
	return newTransport(ctx, certsDir, docker.HostCapabilityPull)
}

func newTransport(ctx context.Context, certsDir string, need docker.HostCapabilities) *Transport {
	opts := config.HostOptions{}
	if certsDir != "" {
		opts.HostDir = config.HostDirFromRoot(certsDir)
	}
	return &Transport{
		hosts:  config.ConfigureHosts(ctx, opts),
		need:   need,
		plain:  http.DefaultTransport,
		routes: make(map[string][]route),
	}
}

// dockerHub is the name under which go-containerregistry knows docker.io, by
// which hosts.toml calls it.
const dockerHub = "index.docker.io"

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Path != "/v2" && !strings.HasPrefix(req.URL.Path, "/v2/") {
		return t.plain.RoundTrip(req)
	}
	routes, err := t.route(req.URL.Host)
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	last := len(routes) - 1
	if t.need == docker.HostCapabilityPush || req.Body != nil {
		last = 0
	}
	for _, r := range routes[:last] {
		resp, err := r.roundTrip(req)
		if err == nil && resp.StatusCode < http.StatusBadRequest {
			return resp, nil
		}
		if err == nil {
			resp.Body.Close()
		}
	}
	return routes[last].roundTrip(req)
}

func (r *route) roundTrip(req *http.Request) (*http.Response, error) {
	out := req.Clone(req.Context())
	out.URL.Scheme, out.URL.Host, out.Host = r.endpoint.Scheme, r.endpoint.Host, ""
	rest := strings.TrimPrefix(req.URL.Path, "/v2")
	out.URL.Path, out.URL.RawPath = r.endpoint.Path+rest, ""
	for k, v := range r.endpoint.Header {
		out.Header[k] = v
	}
	resp, err := r.transport.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	// To the client the answer came from where it asked: redirects and upload
	// locations lead back here.
	if l := resp.Header.Get("Location"); l != "" {
		resp.Header.Set("Location", r.asked(l, req.URL, out.URL))
	}
	resp.Request = req
	return resp, nil
}

// asked translates a location in an answer to the name that the client knows.
// Locations at other hosts stay as they are.
func (r *route) asked(location string, in, out *url.URL) string {
	u, err := out.Parse(location)
	if err != nil || u.Host != out.Host {
		return location
	}
	u.Scheme, u.Host = in.Scheme, in.Host
	if rest, ok := strings.CutPrefix(u.Path, r.endpoint.Path); ok {
		u.Path, u.RawPath = "/v2"+rest, ""
	}
	return u.String()
}

func (t *Transport) route(host string) ([]route, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r, ok := t.routes[host]; ok {
		return r, nil
	}
	name := host
	if name == dockerHub {
		name = "docker.io"
	}
	endpoints, err := t.hosts(name)
	if err != nil {
		return nil, fmt.Errorf("registry configuration of %s: %w", name, err)
	}
	var routes []route
	for _, e := range endpoints {
		if !e.Capabilities.Has(t.need) {
			continue
		}
		r := route{endpoint: e, transport: t.plain}
		if e.Client != nil && e.Client.Transport != nil {
			r.transport = e.Client.Transport
		}
		routes = append(routes, r)
	}
	if len(routes) == 0 && t.need == docker.HostCapabilityPush {
		return nil, fmt.Errorf("%s: %w", name, ErrNoPush)
	}
	if len(routes) == 0 {
		return nil, fmt.Errorf("%s: %w", name, ErrNoPull)
	}
	t.routes[host] = routes
	return routes, nil
}

var (
	// ErrNoPush means that hosts.toml names no host that takes pushes.
	ErrNoPush = errors.New(`the registry's hosts.toml allows no push: add "push" to the capabilities of a host`)
	// ErrNoPull means that hosts.toml names no host to pull from.
	ErrNoPull = errors.New(`the registry's hosts.toml allows no pull: add "pull" to the capabilities of a host`)
)
