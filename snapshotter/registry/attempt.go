// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// maxHops bounds the redirects of one request.
const maxHops = 5

// try asks one host. On success the body is at the range's beginning.
func (d *Reader) try(host *host) *Error {
	ctx, cancel := context.WithCancel(d.ctx)
	patience := d.patience(time.Now())
	d.stall = time.AfterFunc(patience, cancel)
	resp, err := d.request(ctx, host)
	if err == nil {
		if err = d.check(host, resp); err == nil {
			d.body, d.stop, d.served = resp.Body, cancel, host.Host
			host.answered()
			return nil
		}
		resp.Body.Close()
	}
	if !d.stall.Stop() && d.ctx.Err() == nil {
		err = transportError(host.Host, errStalled)
		err.hasty = patience < d.repo.client.opts.StallTimeout
		// Something on the way may have forgotten the connections to it: those at rest are no better.
		host.closeIdle()
	}
	cancel()
	if err.Status == 0 && err.temporary && d.ctx.Err() == nil {
		host.silent()
	}
	if after := err.after; after > 0 {
		host.rest(min(after, d.timeout))
	}
	return err
}

// request gets a successful response: from where the host redirected to
// before, or from the host.
func (d *Reader) request(ctx context.Context, host *host) (*http.Response, *Error) {
	if at := d.repo.storedRedirect(d.rg.Digest, host.Host); at != "" {
		resp, err := d.send(ctx, host, at, false)
		if err == nil && isSuccess(resp.StatusCode) {
			return resp, nil
		}
		if err == nil {
			resp.Body.Close()
		}
		// Signed URLs expire; the registry hands out a new one.
		d.repo.dropRedirect(d.rg.Digest, at)
		if ctx.Err() != nil {
			return nil, transportError(host.Host, ctx.Err())
		}
	}
	return d.ask(ctx, host)
}

// ask sends the request to the host, answers its challenge and follows its
// redirects.
func (d *Reader) ask(ctx context.Context, host *host) (*http.Response, *Error) {
	resp, err := d.send(ctx, host, d.url(host), true)
	if err == nil && resp.StatusCode == http.StatusUnauthorized && host.Authorizer != nil && !authorized(host, resp) {
		if aerr := host.Authorizer.AddResponses(ctx, []*http.Response{resp}); aerr != nil {
			herr := statusError(host.Host, resp)
			if !errdefs.IsNotImplemented(aerr) {
				herr.Cause += ": " + oneLine(aerr.Error())
			}
			return nil, herr
		}
		drain(resp)
		resp, err = d.send(ctx, host, d.url(host), true)
	}
	if err != nil {
		return nil, err
	}
	if isRedirect(resp.StatusCode) {
		return d.follow(ctx, host, resp)
	}
	if !isSuccess(resp.StatusCode) {
		refused := authorized(host, resp)
		err := statusError(host.Host, resp)
		// A token may have expired or been revoked. Some registries say so with 403.
		err.stale = refused && (err.Status == http.StatusUnauthorized || err.Status == http.StatusForbidden)
		return nil, err
	}
	return resp, nil
}

// authorized reports whether the authorizer had something to add to the request.
func authorized(host *host, resp *http.Response) bool {
	return resp.Request.Header.Get("Authorization") != host.Header.Get("Authorization")
}

// follow follows a host's redirects to its storage, and remembers where that is.
func (d *Reader) follow(ctx context.Context, host *host, resp *http.Response) (*http.Response, *Error) {
	for hop := 0; ; hop++ {
		to, uerr := resp.Location()
		drain(resp)
		if uerr != nil || hop >= maxHops || (to.Scheme != "https" && to.Scheme != "http") {
			return nil, wrong(host.Host, "redirect that cannot be followed (HTTP status %d)", resp.StatusCode)
		}
		var err *Error
		if resp, err = d.send(ctx, host, to.String(), false); err != nil {
			err.Cause = "the storage that it redirects to: " + err.Cause
			return nil, err
		}
		switch {
		case isSuccess(resp.StatusCode):
			d.repo.storeRedirect(d.rg.Digest, host.Host, to.String())
			return resp, nil
		case !isRedirect(resp.StatusCode):
			return nil, storageError(host.Host, resp)
		}
	}
}

// url is where a host has the content.
func (d *Reader) url(host *host) string {
	u := url.URL{Scheme: host.Scheme, Host: host.Host, Path: path.Join("/", host.Path, d.repo.name, d.kind, d.rg.Digest.String())}
	query := maps.Clone(d.query)
	if ref := d.repo.ref.Hostname(); host.Host != ref && (ref != "docker.io" || host.Host != "registry-1.docker.io") {
		if query == nil {
			query = url.Values{}
		}
		query.Set("ns", ref) // tells a mirror whose content it is
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// send sends one HTTP request. Credentials and the host's own headers go to the
// registry only, not to where it redirects.
func (d *Reader) send(ctx context.Context, host *host, at string, registry bool) (*http.Response, *Error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, wrong(host.Host, "address that cannot be used")
	}
	if registry {
		for k, v := range host.Header {
			req.Header[k] = append(req.Header[k], v...)
		}
		if err := host.authorize(req); err != nil {
			return nil, tokenError(host.Host, err)
		}
	}
	if d.kind == "manifests" {
		req.Header.Set("Accept", strings.Join(manifestTypes, ", "))
	}
	if d.ranged() {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", d.rg.Offset, d.rg.Offset+d.rg.Length-1))
	}
	client := http.Client{}
	if host.Client != nil {
		client = *host.Client
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	d.repo.count(1, 0)
	resp, err := client.Do(req)
	if err != nil {
		return nil, transportError(host.Host, err)
	}
	return resp, nil
}

// ranged reports whether a part is asked for. Blobs are always: so it is known
// whether the host serves ranges before a page is needed.
func (d *Reader) ranged() bool { return d.kind == "blobs" }

var manifestTypes = []string{
	"application/vnd.oci.image.manifest.v1+json",
	"application/vnd.oci.image.index.v1+json",
	"application/vnd.docker.distribution.manifest.list.v2+json",
	"application/vnd.docker.distribution.manifest.v2+json",
}

func isRedirect(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return true
	}
	return false
}
