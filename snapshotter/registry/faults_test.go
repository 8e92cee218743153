// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/test/faultproxy"
	"thaw.dev/thaw/test/stack/registry"
)

// behind starts a proxy in front of a registry that holds content.
func behind(t *testing.T) *faultproxy.Proxy {
	t.Helper()
	return closing(t)(faultproxy.Start(embedded(t)))
}

// embedded starts a registry that holds content, and returns its address.
func embedded(t *testing.T) string {
	t.Helper()
	r, err := registry.Start("127.0.0.1:0", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	resp, err := http.Post("http://"+r.Addr()+"/v2/"+repoName+"/blobs/uploads/?digest="+dgst.String(), "", bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		t.Fatal(resp.Status)
	}
	return r.Addr()
}

func closing(t *testing.T) func(*faultproxy.Proxy, error) *faultproxy.Proxy {
	return func(p *faultproxy.Proxy, err error) *faultproxy.Proxy {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
		return p
	}
}

// mirrored has a registry's content asked of a mirror first.
func mirrored(t *testing.T, mirror, origin *faultproxy.Proxy) *Repository {
	t.Helper()
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n[host.%q]\n", origin.URL(), mirror.URL()))
	return open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
}

// reads are the ways in which content is fetched: what a container needs before it starts, and its pages.
var reads = map[string]func(context.Context, *Repository) error{
	"metadata": func(ctx context.Context, r *Repository) error {
		p, err := r.Blob(ctx, desc, 1<<20)
		return same(p, content, err)
	},
	"pages": func(ctx context.Context, r *Repository) error {
		p, err := readRange(ctx, r, 100_000, 90_000)
		return same(p, content[100_000:190_000], err)
	},
}

func same(got, want []byte, err error) error {
	if err == nil && !bytes.Equal(got, want) {
		return fmt.Errorf("wrong bytes were taken for the right ones")
	}
	return err
}

// TestRiddenOut has each fault that passes.
func TestRiddenOut(t *testing.T) {
	for name, fault := range map[string]struct {
		times int64
		is    faultproxy.Fault
	}{
		"reset":               {2, faultproxy.Reset(0)},
		"reset in data":       {2, faultproxy.Reset(20_000)},
		"stall":               {2, faultproxy.Stall(0)},
		"stall in data":       {2, faultproxy.Stall(20_000)},
		"truncated":           {2, faultproxy.Truncate(20_000)},
		"408":                 {2, faultproxy.Status(408)},
		"429":                 {2, faultproxy.Status(429)},
		"429 with wait":       {2, faultproxy.Status(429, "Retry-After: 0")},
		"500":                 {2, faultproxy.Status(500)},
		"502":                 {2, faultproxy.Status(502)},
		"503":                 {2, faultproxy.Status(503)},
		"504":                 {2, faultproxy.Status(504)},
		"other range":         {1, faultproxy.Elsewhere()},
		"no length":           {1, faultproxy.Status(206)},
		"encoded":             {1, faultproxy.Status(200, "Content-Encoding: gzip")},
		"200 instead of 206":  {1, faultproxy.Unranged()},
		"never ranges, small": {1 << 30, faultproxy.Unranged()},
	} {
		for kind, read := range reads {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				p := behind(t)
				p.Inject(faultproxy.Blobs(faultproxy.First(fault.times, fault.is)))
				if err := read(t.Context(), open(t, plainHosts(t), p.Addr())); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

// TestGivenUp has each fault that stays. The fetch ends within its time with one line that has cause and remedy.
func TestGivenUp(t *testing.T) {
	for name, tc := range map[string]struct {
		fault  faultproxy.Fault
		is     func(error) bool
		cause  string
		remedy string
		atOnce bool
	}{
		"reset":          {faultproxy.Reset(0), errdefs.IsUnavailable, "connection reset", "check that the registry runs", false},
		"reset in data":  {faultproxy.Reset(1), errdefs.IsUnavailable, "connection reset", "check that the registry runs", false},
		"stall":          {faultproxy.Stall(0), errdefs.IsUnavailable, "no byte arrived in time", "network", false},
		"stall in data":  {faultproxy.Stall(1), errdefs.IsUnavailable, "no byte arrived in time", "network", false},
		"trickle":        {faultproxy.Trickle(10 * time.Millisecond), errdefs.IsUnavailable, "bytes arrive too slowly", "network", false},
		"truncated":      {faultproxy.Truncate(1), errdefs.IsUnavailable, "broke off", "check that the registry runs", false},
		"skipped, cut":   {faultproxy.Chain(faultproxy.Unranged(), faultproxy.Truncate(90_000)), errdefs.IsUnavailable, "broke off", "check that the registry runs", false},
		"other range":    {faultproxy.Elsewhere(), errdefs.IsDataLoss, "instead of", "proxy", true},
		"401":            {faultproxy.Status(401), errdefs.IsUnauthorized, "401 Unauthorized", "credentials", true},
		"403":            {faultproxy.Status(403), errdefs.IsPermissionDenied, "403 Forbidden", "credentials", true},
		"404":            {faultproxy.Status(404), errdefs.IsNotFound, "404 Not Found", "push the checkpoint image again", true},
		"410":            {faultproxy.Status(410), errdefs.IsNotFound, "410 Gone", "push the checkpoint image again", true},
		"416":            {faultproxy.Status(416), errdefs.IsDataLoss, "416", "shorter", true},
		"429":            {faultproxy.Status(429), errdefs.IsResourceExhausted, "429", "a mirror", false},
		"429 for long":   {faultproxy.Status(429, "Retry-After: 3600"), errdefs.IsResourceExhausted, "429", "a mirror", false},
		"500":            {faultproxy.Status(500), errdefs.IsUnavailable, "500", "a mirror", false},
		"503 for long":   {faultproxy.Status(503, "Retry-After: 3600"), errdefs.IsUnavailable, "503", "a mirror", false},
		"418":            {faultproxy.Status(418), errdefs.IsUnknown, "418", "log", true},
		"redirect loop":  {faultproxy.Status(307, "Location: /v2/x/blobs/y"), errdefs.IsDataLoss, "redirect that cannot be followed", "proxy", true},
		"redirect: file": {faultproxy.Status(307, "Location: file:///etc/passwd"), errdefs.IsDataLoss, "redirect that cannot be followed", "proxy", true},
	} {
		for kind, read := range reads {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				p := behind(t)
				p.Inject(tc.fault)
				r := openBriefly(t, plainHosts(t), p.Addr())
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // it would be for ever
				defer cancel()
				err := read(ctx, r)
				if !tc.is(err) {
					t.Fatalf("got %v of the wrong class", err)
				}
				line(t, err, p.Addr(), tc.cause, tc.remedy)
				n := len(p.Requests())
				if tc.atOnce && n > 2*(maxHops+1) || n > 40 {
					t.Errorf("%d requests", n)
				}
			})
		}
	}
}

// line checks that an error is one line that has some words and no address with secrets.
func line(t *testing.T, err error, words ...string) {
	t.Helper()
	got := err.Error()
	if strings.ContainsAny(got, "\n\x1b") || strings.Contains(got, "://") || strings.Contains(got, faultproxy.Secret) {
		t.Errorf("not one clean line without addresses: %q", got)
	}
	for _, w := range words {
		if !strings.Contains(got, w) {
			t.Errorf("%q does not say %q", got, w)
		}
	}
}

// TestDamaged: what does not have its digest is fetched once more, from another host if there is one, and then refused.
func TestDamaged(t *testing.T) {
	p := behind(t)
	p.Inject(faultproxy.First(1, faultproxy.Damage()))
	r := open(t, plainHosts(t), p.Addr())
	if err := reads["metadata"](t.Context(), r); err != nil {
		t.Fatalf("once: %v", err)
	}
	p.Inject(faultproxy.Damage())
	p.Reset()
	err := reads["metadata"](t.Context(), r)
	if !errdefs.IsDataLoss(err) || len(p.Requests()) != 2 {
		t.Fatalf("always: %v after %d requests", err, len(p.Requests()))
	}
	line(t, err, p.Addr(), "digest", "push the checkpoint image again")

	origin := behind(t)
	r = mirrored(t, p, origin)
	p.Reset()
	if err := reads["metadata"](t.Context(), r); err != nil {
		t.Fatalf("from elsewhere: %v", err)
	}
	if len(p.Requests()) != 1 || len(origin.Requests()) != 1 {
		t.Errorf("%d requests to the damaged mirror, %d to the registry", len(p.Requests()), len(origin.Requests()))
	}
}

// TestGoesOn: bytes that arrived before a connection broke are not asked for again.
func TestGoesOn(t *testing.T) {
	p := behind(t)
	p.Inject(faultproxy.First(1, faultproxy.Truncate(30_000)))
	r := open(t, plainHosts(t), p.Addr())
	if err := reads["pages"](t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if got := r.Stats(); got.Bytes != 90_000 || got.Requests != 2 {
		t.Errorf("%+v", got)
	}
}

// TestNoRanges: a registry that never serves ranges is found out when the first blob is read whole.
func TestNoRanges(t *testing.T) {
	p := behind(t)
	r := open(t, plainHosts(t), p.Addr())
	p.Inject(faultproxy.Blobs(faultproxy.Unranged()))
	if err := r.CheckRanges(maxSkip + 1); err != nil {
		t.Fatalf("nothing is known yet: %v", err)
	}
	if err := reads["metadata"](t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if err := r.CheckRanges(maxSkip); err != nil {
		t.Errorf("small blobs: %v", err)
	}
	err := r.CheckRanges(maxSkip + 1)
	if !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("large blobs: %v", err)
	}
	line(t, err, p.Addr(), "ignores byte ranges", "registry or mirror that serves ranges")
	_, err = r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Offset: desc.Size - 10, Length: 10})
	if err != nil {
		t.Errorf("the end of a small blob: %v", err)
	}
	p.Inject(nil)
	if err := reads["pages"](t.Context(), r); err != nil || r.CheckRanges(1<<40) != nil {
		t.Errorf("ranges are served after all: %v, %v", err, r.CheckRanges(1<<40))
	}
}

// TestTrickleOfTwo: two hosts that send a byte now and then do not keep a fetch alive between them.
func TestTrickleOfTwo(t *testing.T) {
	mirror, origin := behind(t), behind(t)
	mirror.Inject(faultproxy.Trickle(10 * time.Millisecond))
	origin.Inject(faultproxy.Trickle(10 * time.Millisecond))
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n[host.%q]\n", origin.URL(), mirror.URL()))
	r := openBriefly(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := reads["pages"](ctx, r); !errdefs.IsUnavailable(err) {
		t.Fatal(err)
	}
}
