// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
)

// hostSet is one reading of the node's registry configuration. It holds the
// connections and tokens of its hosts, mirrors first.
type hostSet struct{ hosts []*host }

// host is a host that may be pulled from.
type host struct {
	docker.RegistryHost
	// tokens is held while the authorizer, which hosts of a set may share, is asked:
	// it does not allow for others while it fetches a token.
	tokens *sync.Mutex

	// free is when it wants to be asked again, in nanoseconds since the epoch; 0 is at once.
	free atomic.Int64
	// failed is when it last gave no answer, in nanoseconds since the epoch; 0 if it has answered since.
	failed atomic.Int64
	// ranges is what it was seen to do with byte ranges.
	ranges atomic.Int32
}

// aside is for how long others are asked before a host that gave no answer.
const aside = 10 * time.Second

const (
	rangesUnknown = int32(iota)
	rangesIgnored
	rangesServed
)

func (h *host) same(o *host) bool { return h.Host == o.Host && h.Path == o.Path }

// busy reports whether the host asked to be left alone. Before a fetch is given
// up, the host is tried nevertheless: from last on.
func (h *host) busy(last time.Time) bool {
	free := h.free.Load()
	if free == 0 {
		return false
	}
	now := time.Now()
	return now.UnixNano() < free && now.Before(last)
}

// down reports whether others should be asked first, because the host gave no
// answer a moment ago. Else each page would wait for a mirror that is gone. Now
// and then it is false for one, who finds out whether the host is back.
func (h *host) down() bool {
	failed := h.failed.Load()
	if failed == 0 {
		return false
	}
	now := time.Now().UnixNano()
	return now-failed < int64(aside) || !h.failed.CompareAndSwap(failed, now)
}

// silent notes that the host gave no answer, answered that it did.
func (h *host) silent() { h.failed.Store(time.Now().UnixNano()) }

func (h *host) answered() {
	if h.failed.Load() != 0 {
		h.failed.Store(0)
	}
}

// freeIn is how long the host wants to be left alone.
func (h *host) freeIn(now time.Time) time.Duration {
	free := h.free.Load()
	if free == 0 {
		return 0
	}
	return time.Duration(free - now.UnixNano())
}

// rest notes that the host wants to be left alone.
func (h *host) rest(d time.Duration) { h.free.Store(time.Now().Add(d).UnixNano()) }

// authorize adds to a request what the registry asked for before.
func (h *host) authorize(req *http.Request) error {
	if h.Authorizer == nil {
		return nil
	}
	h.tokens.Lock()
	defer h.tokens.Unlock()
	return h.Authorizer.Authorize(req.Context(), req)
}

// closeIdle ends connections that nobody uses.
func (h *host) closeIdle() {
	if h.Client != nil {
		h.Client.CloseIdleConnections()
	}
}

func (s *hostSet) closeIdle() {
	for _, h := range s.hosts {
		h.closeIdle()
	}
}

// pullHosts returns the hosts that may be pulled from.
func (r *Repository) pullHosts() (*hostSet, error) {
	if set := r.hosts.Load(); set != nil {
		return set, nil
	}
	return r.renew(nil)
}

// renew reads the node's registry configuration anew, unless somebody did since
// it was like old. Tokens, credentials and certificates are forgotten with the
// old one: of many who find a token refused, one makes the others a new set.
func (r *Repository) renew(old *hostSet) (*hostSet, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if set := r.hosts.Load(); set != old {
		return set, nil
	}
	all, err := r.client.opts.Hosts(r.ref.Hostname())
	if err != nil {
		return nil, fmt.Errorf("registry configuration for %s: %w", r.ref.Hostname(), err)
	}
	set, tokens := &hostSet{}, new(sync.Mutex)
	for _, c := range all {
		if !c.Capabilities.Has(docker.HostCapabilityPull) {
			continue
		}
		h := &host{RegistryHost: c, tokens: tokens}
		if old != nil {
			if i := slices.IndexFunc(old.hosts, h.same); i >= 0 {
				h.free.Store(old.hosts[i].free.Load())
				h.failed.Store(old.hosts[i].failed.Load())
				h.ranges.Store(old.hosts[i].ranges.Load())
			}
		}
		set.hosts = append(set.hosts, h)
	}
	if len(set.hosts) == 0 {
		return nil, failure("content of "+r.ref.Locator, nil)
	}
	if old != nil {
		old.closeIdle()
	}
	r.hosts.Store(set)
	return set, nil
}

// CheckRanges returns an error if a part at the end of a blob of a size, in bytes,
// cannot be read, as far as is known: when blobs were read whole and all hosts that
// served them have ignored byte ranges. It asks nobody.
func (r *Repository) CheckRanges(size int64) error {
	set := r.hosts.Load()
	if set == nil || size <= maxSkip {
		return nil
	}
	var errs []*Error
	for _, h := range set.hosts {
		switch h.ranges.Load() {
		case rangesServed:
			return nil
		case rangesIgnored:
			errs = append(errs, noRanges(h.Host))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return failure("pages", errs)
}

// noRanges is not of the class ErrNotImplemented, which containerd takes for a
// shim that lacks the call.
func noRanges(host string) *Error {
	e := wrong(host, "it ignores byte ranges (HTTP status 200 instead of 206)")
	e.class, e.Remedy = errdefs.ErrFailedPrecondition, "use a registry or mirror that serves ranges"
	return e
}

type redirect struct {
	host string // the registry host that redirected
	url  string // secret: it may be signed
}

// maxRedirects bounds how many redirects are remembered.
const maxRedirects = 1024

// storedRedirect returns where a host redirected a blob's request to before.
func (r *Repository) storedRedirect(d digest.Digest, host string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.redirects[d]; at.host == host {
		return at.url
	}
	return ""
}

func (r *Repository) storeRedirect(d digest.Digest, host, url string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.redirects) >= maxRedirects {
		clear(r.redirects)
	}
	r.redirects[d] = redirect{host: host, url: url}
}

// dropRedirect forgets a redirect that does not work any more, if nobody has
// found another one meanwhile.
func (r *Repository) dropRedirect(d digest.Digest, url string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.redirects[d].url == url {
		delete(r.redirects, d)
	}
}

func isSuccess(status int) bool {
	return status == http.StatusOK || status == http.StatusPartialContent
}
