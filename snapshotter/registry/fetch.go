// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"mime"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
)

const (
	// maxSkip bounds what is read and thrown away when a host ignores ranges
	// and sends the blob from its beginning.
	maxSkip = 16 << 20
	// maxHops bounds the redirects of one request.
	maxHops = 5
	// minAttempt is how long an attempt may take that begins just before a fetch is
	// given up: one that is broken off hides why all before it failed.
	minAttempt = 100 * time.Millisecond
	// maxChallenges bounds how often one request answers 401.
	maxChallenges = 3
)

var errStalled = errors.New("no byte arrived in time")

// Reader reads one range. It is not safe for concurrent use.
type Reader struct {
	repo *Repository
	kind string
	rg   Range // what is still wanted: Offset and Length move with each read
	// query is added to the address.
	query url.Values

	ctx     context.Context
	timeout time.Duration
	giveUp  time.Time // without progress until then, the fetch has failed
	round   int       // how often all hosts were tried since the last progress
	renewed bool      // tokens were forgotten once

	hosts []docker.RegistryHost
	errs  []*Error // of each host, its last

	host   int // that the body comes from
	body   io.ReadCloser
	served string // the name of that host
	stop   func() // ends the attempt that the body belongs to
	idle   *time.Timer
}

// open starts to read; there is a body when it returns without error, or
// nothing to read.
func (r *Repository) open(ctx context.Context, kind string, rg Range, timeout time.Duration) (*Reader, error) {
	hosts, err := r.pullHosts(false)
	if err != nil {
		return nil, err
	}
	ctx, err = docker.ContextWithRepositoryScope(ctx, r.ref, false)
	if err != nil {
		return nil, err
	}
	rd := &Reader{repo: r, kind: kind, rg: rg, ctx: ctx, timeout: timeout}
	rd.setHosts(hosts)
	rd.progress()
	if rg.Length == 0 {
		return rd, nil
	}
	return rd, rd.connect()
}

// setHosts takes the hosts over with the one to avoid behind all others.
func (d *Reader) setHosts(hosts []docker.RegistryHost) {
	d.hosts = slices.Clone(hosts)
	slices.SortStableFunc(d.hosts, func(a, b docker.RegistryHost) int {
		switch {
		case a.Host == b.Host:
			return 0
		case a.Host == d.rg.Avoid:
			return 1
		case b.Host == d.rg.Avoid:
			return -1
		}
		return 0
	})
	d.errs = make([]*Error, len(hosts))
	d.host = 0
}

func (d *Reader) progress() {
	d.giveUp = time.Now().Add(d.timeout)
	d.round = 0
}

// Host is the registry host that the last bytes came from.
func (d *Reader) Host() string { return d.served }

// Read returns the next bytes of the range and io.EOF behind its last.
func (d *Reader) Read(p []byte) (int, error) {
	for {
		if d.rg.Length == 0 {
			return 0, io.EOF
		}
		if d.body == nil {
			if err := d.connect(); err != nil {
				return 0, err
			}
		}
		if int64(len(p)) > d.rg.Length {
			p = p[:d.rg.Length]
		}
		n, err := d.body.Read(p)
		if n > 0 {
			d.rg.Offset += int64(n)
			d.rg.Length -= int64(n)
			d.repo.count(0, int64(n))
			d.progress()
			d.idle.Reset(d.repo.client.opts.StallTimeout)
			if err != nil || d.rg.Length == 0 {
				d.closeBody()
			}
			return n, nil
		}
		if err != nil {
			err = d.bodyError(err)
			d.closeBody()
			d.errs[d.host] = transportError(d.served, err)
			d.host++ // another host may have a better line
			if cerr := d.ctx.Err(); cerr != nil {
				return 0, cerr
			}
		}
	}
}

// bodyError says what broke a body off.
func (d *Reader) bodyError(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("the answer broke off: %w", io.ErrUnexpectedEOF)
	case errors.Is(err, context.Canceled) && d.ctx.Err() == nil:
		return errStalled
	}
	return err
}

func (d *Reader) closeBody() {
	if d.body != nil {
		d.idle.Stop()
		d.body.Close()
		d.stop()
		d.body = nil
	}
}

// Close ends the fetch.
func (d *Reader) Close() error {
	d.closeBody()
	return nil
}

// connect tries host after host, and all of them again with growing waits, until
// one answers with the range's beginning.
func (d *Reader) connect() error {
	for {
		var wait time.Duration
		hopeless := true
		for ; d.host < len(d.hosts); d.host++ {
			if e := d.errs[d.host]; e != nil && !e.temporary {
				continue
			}
			err := d.try(d.hosts[d.host])
			if err == nil {
				return nil
			}
			if cerr := d.ctx.Err(); cerr != nil {
				return cerr
			}
			d.errs[d.host] = err
			hopeless = hopeless && !err.temporary
			if err.temporary {
				wait = max(wait, err.retryAfter())
			}
			log.G(d.ctx).WithError(err).WithField("content", describe(d.kind, d.rg.Digest)).Debug("registry host failed")
		}
		d.host = 0
		if hopeless && d.allRefused() {
			return d.fail()
		}
		if err := d.backoff(wait); err != nil {
			return err
		}
	}
}

func (d *Reader) allRefused() bool {
	return !slices.ContainsFunc(d.errs, func(e *Error) bool { return e == nil || e.temporary })
}

func (d *Reader) fail() error {
	return failure(describe(d.kind, d.rg.Digest), slices.DeleteFunc(d.errs, func(e *Error) bool { return e == nil }))
}

// backoff waits before the hosts are tried again, at least as long as they asked
// for, or fails when that would be too late.
func (d *Reader) backoff(least time.Duration) error {
	wait := d.repo.client.opts.Backoff << min(d.round, 5)
	wait += rand.N(wait / 2)
	wait = max(wait, least)
	d.round++
	if time.Now().Add(wait).After(d.giveUp) {
		return d.fail()
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-d.ctx.Done():
		return d.ctx.Err()
	}
}

// try asks one host. On success the body is at the range's beginning.
func (d *Reader) try(host docker.RegistryHost) *Error {
	ctx, cancel := context.WithCancel(d.ctx)
	stall := min(d.repo.client.opts.StallTimeout, max(time.Until(d.giveUp), minAttempt))
	d.idle = time.AfterFunc(stall, cancel)
	resp, err := d.request(ctx, host)
	if err == nil {
		if err = d.check(host, resp); err == nil {
			d.body, d.stop, d.served = resp.Body, cancel, host.Host
			return nil
		}
		resp.Body.Close()
	}
	if !d.idle.Stop() && d.ctx.Err() == nil {
		err = transportError(host.Host, errStalled)
	}
	cancel()
	return err
}

// request gets a successful response: from where the host redirected to
// before, or from the host.
func (d *Reader) request(ctx context.Context, host docker.RegistryHost) (*http.Response, *Error) {
	if at := d.repo.storedRedirect(d.rg.Digest, host.Host); at != "" {
		resp, err := d.send(ctx, host, at, false)
		if err == nil && isSuccess(resp.StatusCode) {
			return resp, nil
		}
		if err == nil {
			resp.Body.Close()
		}
		// Signed URLs expire; the registry hands out a new one.
		d.repo.storeRedirect(d.rg.Digest, host.Host, "")
		if ctx.Err() != nil {
			return nil, transportError(host.Host, ctx.Err())
		}
	}
	return d.ask(ctx, host)
}

// ask sends the request to the host, answers its challenges and follows its
// redirects.
func (d *Reader) ask(ctx context.Context, host docker.RegistryHost) (*http.Response, *Error) {
	var challenged []*http.Response
	for {
		resp, err := d.send(ctx, host, d.url(host), true)
		if err != nil {
			return nil, err
		}
		if resp.StatusCode == http.StatusUnauthorized && host.Authorizer != nil && len(challenged) < maxChallenges {
			challenged = append(challenged, resp)
			herr := statusError(host.Host, resp)
			if err := host.Authorizer.AddResponses(ctx, challenged); err != nil {
				if !errdefs.IsNotImplemented(err) {
					herr.Cause += ": " + oneLine(err.Error())
				}
				return nil, herr
			}
			if len(challenged) == 2 && !d.renewed {
				// The authorizer answered with what it has cached, and that
				// is refused: start with nothing cached.
				d.renewed = true
				if fresh, ok := d.renew(host); ok {
					host, challenged = fresh, nil
				}
			}
			continue
		}
		for hop := 0; isRedirect(resp.StatusCode); hop++ {
			to, uerr := resp.Location()
			drain(resp)
			if uerr != nil || hop >= maxHops || (to.Scheme != "https" && to.Scheme != "http") {
				return nil, wrong(host.Host, "redirect that cannot be followed (HTTP status %d)", resp.StatusCode)
			}
			if resp, err = d.send(ctx, host, to.String(), false); err != nil {
				return nil, err
			}
			if isSuccess(resp.StatusCode) {
				d.repo.storeRedirect(d.rg.Digest, host.Host, to.String())
			}
		}
		if !isSuccess(resp.StatusCode) {
			after := resp.Header.Get("Retry-After")
			e := statusError(host.Host, resp)
			if e.temporary {
				e.wrapped = retryAfterError(parseRetryAfter(after))
			}
			return nil, e
		}
		return resp, nil
	}
}

// renew reads the node's registry configuration again, which starts with fresh
// authorizers, and returns the same host from it.
func (d *Reader) renew(old docker.RegistryHost) (docker.RegistryHost, bool) {
	hosts, err := d.repo.pullHosts(true)
	if err != nil {
		return old, false
	}
	i := slices.IndexFunc(hosts, func(h docker.RegistryHost) bool { return h.Host == old.Host && h.Path == old.Path })
	if i < 0 {
		return old, false
	}
	j := slices.IndexFunc(d.hosts, func(h docker.RegistryHost) bool { return h.Host == old.Host && h.Path == old.Path })
	d.hosts[j] = hosts[i]
	return hosts[i], true
}

// url is where a host has the content.
func (d *Reader) url(host docker.RegistryHost) string {
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
func (d *Reader) send(ctx context.Context, host docker.RegistryHost, at string, registry bool) (*http.Response, *Error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, wrong(host.Host, "address that cannot be used")
	}
	if registry {
		for k, v := range host.Header {
			req.Header[k] = append(req.Header[k], v...)
		}
		if host.Authorizer != nil {
			if err := host.Authorizer.Authorize(ctx, req); err != nil {
				e := transportError(host.Host, err)
				e.Cause = "no authorization: " + e.Cause
				if ctx.Err() == nil {
					e.Remedy = remedyCredentials
				}
				return nil, e
			}
		}
	}
	if d.kind == "manifests" {
		req.Header.Set("Accept", strings.Join(manifestTypes, ", "))
	}
	if d.partial() {
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

var manifestTypes = []string{
	"application/vnd.oci.image.manifest.v1+json",
	"application/vnd.oci.image.index.v1+json",
	"application/vnd.docker.distribution.manifest.list.v2+json",
	"application/vnd.docker.distribution.manifest.v2+json",
}

func (d *Reader) partial() bool { return d.rg.Offset != 0 || d.rg.Length != d.rg.Size }

// check makes sure that the body is what was asked for and moves it to the
// range's beginning.
func (d *Reader) check(host docker.RegistryHost, resp *http.Response) *Error {
	if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return wrong(host.Host, "answer in encoding %.40q that was not asked for", enc)
	}
	if resp.StatusCode == http.StatusPartialContent {
		return d.checkPartial(host, resp)
	}
	if n := resp.ContentLength; n >= 0 && n != d.rg.Size {
		return wrong(host.Host, "%d bytes instead of %d", n, d.rg.Size)
	}
	if !d.partial() || d.rg.Offset == 0 {
		return nil
	}
	if d.rg.Offset > maxSkip {
		e := wrong(host.Host, "it ignores byte ranges (HTTP status 200 instead of 206)")
		e.class, e.Remedy = errdefs.ErrNotImplemented, "use a registry or mirror that serves ranges"
		return e
	}
	n, err := io.CopyN(io.Discard, progressReader{d, resp.Body}, d.rg.Offset)
	d.repo.count(0, n)
	if err != nil {
		return transportError(host.Host, d.bodyError(err))
	}
	return nil
}

// progressReader restarts the stall timer with each read.
type progressReader struct {
	d *Reader
	r io.Reader
}

func (p progressReader) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	if n > 0 {
		p.d.idle.Reset(p.d.repo.client.opts.StallTimeout)
	}
	return n, err
}

// checkPartial checks a 206 (RFC 9110, 15.3.7).
func (d *Reader) checkPartial(host docker.RegistryHost, resp *http.Response) *Error {
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t == "multipart/byteranges" {
		return wrong(host.Host, "several ranges where one was asked for")
	}
	first, last, total, ok := parseContentRange(resp.Header.Get("Content-Range"))
	switch {
	case !ok:
		return wrong(host.Host, "HTTP status 206 without a valid Content-Range")
	case first != d.rg.Offset || last < first || last >= d.rg.Offset+d.rg.Length:
		return wrong(host.Host, "bytes %d-%d instead of %d-%d", first, last, d.rg.Offset, d.rg.Offset+d.rg.Length-1)
	case total >= 0 && total != d.rg.Size:
		return wrong(host.Host, "%d bytes in all instead of %d", total, d.rg.Size)
	case resp.ContentLength >= 0 && resp.ContentLength != last-first+1:
		return wrong(host.Host, "%d bytes for a range of %d", resp.ContentLength, last-first+1)
	}
	return nil
}

// parseContentRange parses "bytes 0-9/100"; total is -1 for "*".
func parseContentRange(s string) (first, last, total int64, ok bool) {
	rest, ok := strings.CutPrefix(s, "bytes ")
	span, all, ok2 := strings.Cut(rest, "/")
	a, b, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, 0, false
	}
	var err error
	if first, err = parseNumber(a); err != nil {
		return 0, 0, 0, false
	}
	if last, err = parseNumber(b); err != nil {
		return 0, 0, 0, false
	}
	if all == "*" {
		return first, last, -1, true
	}
	total, err = parseNumber(all)
	return first, last, total, err == nil
}

func parseNumber(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err
}

func isRedirect(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return true
	}
	return false
}

// drain reads what is left of a small body so that the connection can be used
// again.
func drain(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, maxErrorBody)
	resp.Body.Close()
}

// retryAfterError carries how long a host asked to wait.
type retryAfterError time.Duration

func (e retryAfterError) Error() string { return "retry after " + time.Duration(e).String() }

func (e *Error) retryAfter() time.Duration {
	var after retryAfterError
	if errors.As(e.wrapped, &after) {
		return time.Duration(after)
	}
	return 0
}

// parseRetryAfter reads both forms of the header (RFC 9110, 10.2.3).
func parseRetryAfter(s string) time.Duration {
	if s == "" {
		return 0
	}
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(s); err == nil {
		return max(time.Until(t), 0)
	}
	return 0
}
