// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"thaw.dev/thaw/test/faultproxy"
)

// side reads pages eight times side by side, as the page store does.
func side(t *testing.T, r *Repository) error {
	t.Helper()
	var g errgroup.Group
	for range 8 {
		g.Go(func() error { return reads["pages"](t.Context(), r) })
	}
	return g.Wait()
}

// TestTokens: tokens are fetched once for all; when they are refused, with 401 or with 403, one new token is fetched, whoever
// finds out.
func TestTokens(t *testing.T) {
	for _, status := range []int{http.StatusUnauthorized, http.StatusForbidden} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			p, tokens := behind(t), faultproxy.NewTokens()
			p.Inject(tokens.Guard)
			r := open(t, plainHosts(t), p.Addr())
			for kind, read := range reads {
				if err := read(t.Context(), r); err != nil {
					t.Fatalf("%s: %v", kind, err)
				}
			}
			if n := tokens.Issued(); n != 1 {
				t.Errorf("%d tokens at first", n)
			}
			tokens.Revoke(status)
			if err := side(t, r); err != nil {
				t.Fatalf("revoked: %v", err)
			}
			if n := tokens.Issued(); n != 2 {
				t.Errorf("%d tokens after one was revoked", n)
			}
			tokens.Revoke(status)
			if err := reads["metadata"](t.Context(), r); err != nil || tokens.Issued() != 3 {
				t.Errorf("revoked again: %v, %d tokens", err, tokens.Issued())
			}
		})
	}
}

// TestTokenInTheMiddle: a token that is refused when a broken fetch goes on.
func TestTokenInTheMiddle(t *testing.T) {
	p, tokens := behind(t), faultproxy.NewTokens()
	p.Inject(faultproxy.Chain(tokens.Guard, faultproxy.Blobs(faultproxy.First(1, faultproxy.Stall(50_000)))))
	r := open(t, plainHosts(t), p.Addr())
	rd, err := r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Length: desc.Size})
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Close()
	tokens.Revoke(http.StatusUnauthorized)
	got, err := io.ReadAll(rd)
	if err := same(got, content, err); err != nil {
		t.Fatal(err)
	}
}

// TestTokenServer: the token server's faults are no others than the registry's, and one of them does not stay for ever.
func TestTokenServer(t *testing.T) {
	for name, trouble := range map[string]faultproxy.Fault{
		"503":   faultproxy.Status(503),
		"429":   faultproxy.Status(429),
		"reset": faultproxy.Reset(0),
		"stall": faultproxy.Stall(0),
	} {
		for kind, read := range reads {
			t.Run(name+"/"+kind, func(t *testing.T) {
				p, tokens := behind(t), faultproxy.NewTokens()
				p.Inject(tokens.Guard)
				tokens.Trouble(faultproxy.First(2, trouble))
				if err := read(t.Context(), open(t, plainHosts(t), p.Addr())); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
	for name, tc := range map[string]struct {
		trouble faultproxy.Fault
		is      func(error) bool
		most    int // tokens asked for
		words   []string
	}{
		"401": {faultproxy.Status(401), errdefs.IsUnauthorized, 2, []string{"the token server answered HTTP status 401", "docker_config"}},
		"403": {faultproxy.Status(403), errdefs.IsUnauthorized, 2, []string{"the token server answered HTTP status 403", "docker_config"}},
		"500": {faultproxy.Status(500), errdefs.IsUnavailable, 40, []string{"the token server answered HTTP status 500", "registry's log"}},
	} {
		for kind, read := range reads {
			t.Run("always "+name+"/"+kind, func(t *testing.T) {
				p, tokens := behind(t), faultproxy.NewTokens()
				p.Inject(tokens.Guard)
				tokens.Trouble(tc.trouble)
				err := read(t.Context(), openBriefly(t, plainHosts(t), p.Addr()))
				if !tc.is(err) || tokens.Issued() > tc.most {
					t.Fatalf("%v after asking for %d tokens", err, tokens.Issued())
				}
				line(t, err, append(tc.words, p.Addr())...)
			})
		}
	}
}

// TestDenied: a registry that refuses a new token too is not asked for ever.
func TestDenied(t *testing.T) {
	for kind, read := range reads {
		p, tokens := behind(t), faultproxy.NewTokens()
		p.Inject(tokens.Guard)
		r := open(t, plainHosts(t), p.Addr())
		if err := read(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		tokens.Deny(true)
		p.Reset()
		err := read(t.Context(), r)
		if !errdefs.IsUnauthorized(err) || tokens.Issued() != 2 || len(p.Requests()) != 4 {
			t.Errorf("%s: %v after %d tokens in all and %d requests", kind, err, tokens.Issued(), len(p.Requests()))
		}
		line(t, err, "401", "credentials")
	}
}

// TestCredentials: a password that was changed is taken from the node's configuration as soon as the old one is refused.
func TestCredentials(t *testing.T) {
	p := behind(t)
	password := "old"
	p.Inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if u, pw, ok := r.BasicAuth(); !ok || u != "me" || pw != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
	auth := filepath.Join(t.TempDir(), "auth.json")
	write := func(password string) {
		cred := base64.StdEncoding.EncodeToString([]byte("me:" + password))
		if err := os.WriteFile(auth, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, p.Addr(), cred), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old")
	r := open(t, Hosts(t.Context(), HostOptions{DockerConfig: auth}), p.Addr())
	if err := reads["pages"](t.Context(), r); err != nil {
		t.Fatal(err)
	}
	password = "new"
	if err := reads["pages"](t.Context(), r); !errdefs.IsUnauthorized(err) {
		t.Fatalf("wrong password: %v", err)
	}
	write("new")
	if err := reads["pages"](t.Context(), r); err != nil {
		t.Fatalf("changed password: %v", err)
	}
}

// TestSignedStorage: the storage is asked directly as long as its address works, gets no credentials, and is found anew when
// the address has expired; neither its address nor what is secret in it gets into errors.
func TestSignedStorage(t *testing.T) {
	at := embedded(t)
	p, storage := closing(t)(faultproxy.Start(at)), closing(t)(faultproxy.Start(at))
	signer, tokens := faultproxy.NewSigner(storage.URL()), faultproxy.NewTokens()
	p.Inject(faultproxy.Chain(tokens.Guard, faultproxy.Blobs(signer.Redirect)))
	storage.Inject(signer.Check)
	dir := certs(t, p.Addr(), fmt.Sprintf("server = %q\n[host.%q]\n[host.%q.header]\nx-node=\"1\"\n", p.URL(), p.URL(), p.URL()))
	r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), p.Addr())
	for range 5 {
		if err := reads["pages"](t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if signer.Issued() != 1 {
		t.Errorf("%d addresses for five reads", signer.Issued())
	}
	signer.Expire()
	if err := side(t, r); err != nil {
		t.Fatalf("expired: %v", err)
	}
	if n := signer.Issued(); n < 2 || n > 9 {
		t.Errorf("%d addresses after one expired", n)
	}
	// In the middle of a body, which breaks off.
	storage.Inject(faultproxy.Chain(signer.Check, faultproxy.First(1, faultproxy.Stall(50_000))))
	rd, err := r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Length: desc.Size})
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Close()
	signer.Expire()
	got, err := io.ReadAll(rd)
	if err := same(got, content, err); err != nil {
		t.Fatalf("expired in the middle: %v", err)
	}
	// So short-lived that they have expired when they are used.
	storage.Inject(faultproxy.Chain(faultproxy.First(3, faultproxy.Status(403)), signer.Check))
	signer.Expire()
	if err := reads["metadata"](t.Context(), r); err != nil {
		t.Fatalf("short-lived: %v", err)
	}
	// Not used any more.
	p.Inject(tokens.Guard)
	signer.Expire()
	storage.Reset()
	for range 3 {
		if err := reads["pages"](t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(storage.Requests()); n != 1 {
		t.Errorf("the storage was asked %d times in vain", n)
	}
	p.Inject(faultproxy.Chain(tokens.Guard, faultproxy.Blobs(signer.Redirect)))
	for name, tc := range map[string]struct {
		fault faultproxy.Fault
		is    func(error) bool
		words []string
	}{
		"403": {faultproxy.Status(403), errdefs.IsUnavailable, []string{"403 Forbidden", "clock"}},
		"404": {faultproxy.Status(404), errdefs.IsNotFound, []string{"404 Not Found", "push the checkpoint image again"}},
		"503": {faultproxy.Status(503), errdefs.IsUnavailable, []string{"503", "registry's log"}},
		"RST": {faultproxy.Reset(0), errdefs.IsUnavailable, []string{"connection reset", "check that the registry runs"}},
	} {
		storage.Inject(tc.fault)
		for kind, read := range reads {
			err := read(t.Context(), openBriefly(t, plainHosts(t), p.Addr()))
			if !tc.is(err) {
				t.Errorf("%s, %s: %v", name, kind, err)
				continue
			}
			line(t, err, append(tc.words, p.Addr(), "the storage that it redirects to")...)
		}
	}
}
