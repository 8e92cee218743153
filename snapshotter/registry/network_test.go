// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"thaw.dev/thaw/test/faultproxy"
)

// TestMirrorDown: a mirror that goes away is passed over, also in the middle of a body.
func TestMirrorDown(t *testing.T) {
	mirror, origin := behind(t), behind(t)
	r := mirrored(t, mirror, origin)
	for kind, read := range reads {
		if err := read(t.Context(), r); err != nil || len(origin.Requests()) != 0 {
			t.Fatalf("%s with the mirror: %v, %d requests to the registry", kind, err, len(origin.Requests()))
		}
	}
	mirror.Inject(faultproxy.Stall(50_000))
	rd, err := r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Length: desc.Size})
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Close()
	begin := make([]byte, 40_000)
	if _, err := io.ReadFull(rd, begin); err != nil {
		t.Fatal(err)
	}
	if err := mirror.Down(); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(rd)
	if err := same(append(begin, rest...), content, err); err != nil {
		t.Fatal(err)
	}
	if rd.Host() != origin.Addr() {
		t.Errorf("the end came from %s", rd.Host())
	}
	for kind, read := range reads {
		if err := read(t.Context(), r); err != nil {
			t.Fatalf("%s without the mirror: %v", kind, err)
		}
	}
	// It is used again when it is back.
	mirror.Inject(nil)
	if err := mirror.Up(); err != nil {
		t.Fatal(err)
	}
	mirror.Reset()
	later(r)
	if err := reads["pages"](t.Context(), r); err != nil || len(mirror.Requests()) != 1 {
		t.Errorf("%v, %d requests to the mirror", err, len(mirror.Requests()))
	}
}

// later lets the time pass after which hosts that gave no answer are asked again.
func later(r *Repository) {
	for _, h := range r.hosts.Load().hosts {
		if h.failed.Load() != 0 {
			h.failed.Add(-int64(aside))
		}
	}
}

// TestSilentMirror: a mirror that does not answer costs one wait, not one for each page; now and then one finds out whether it is back.
func TestSilentMirror(t *testing.T) {
	mirror, origin := behind(t), behind(t)
	mirror.Inject(faultproxy.Stall(0))
	r := mirrored(t, mirror, origin)
	for range 3 {
		for kind, read := range reads {
			if err := read(t.Context(), r); err != nil {
				t.Fatalf("%s: %v", kind, err)
			}
		}
	}
	if n := len(mirror.Requests()); n != 1 {
		t.Errorf("it was asked %d times at first", n)
	}
	later(r)
	mirror.Reset()
	if err := side(t, r); err != nil {
		t.Fatal(err)
	}
	if n := len(mirror.Requests()); n != 1 {
		t.Errorf("it was asked %d times later", n)
	}
	mirror.Inject(nil)
	later(r)
	mirror.Reset()
	origin.Reset()
	for range 2 {
		if err := side(t, r); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(mirror.Requests()); n <= 8 {
		t.Errorf("it was asked %d times when it was back", n)
	}
	// When there is no other, it is asked.
	if err := origin.Down(); err != nil {
		t.Fatal(err)
	}
	mirror.Inject(faultproxy.First(1, faultproxy.Reset(0)))
	if err := reads["pages"](t.Context(), r); err != nil {
		t.Fatal(err)
	}
}

// TestForgottenConnections: connections of which something on the way knows no more cost one wait, however many there are.
func TestForgottenConnections(t *testing.T) {
	p := behind(t)
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n", p.URL()))
	r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir, Connections: 4}), "registry.test")
	var readers []*Reader
	for range 4 { // side by side, so that each has a connection of its own
		rd, err := r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Length: desc.Size})
		if err != nil {
			t.Fatal(err)
		}
		defer rd.Close()
		readers = append(readers, rd)
	}
	for _, rd := range readers {
		if _, err := io.Copy(io.Discard, rd); err != nil {
			t.Fatal(err)
		}
	}
	p.Forget()
	before := r.Stats().Requests
	if err := reads["pages"](t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if n := r.Stats().Requests - before; n != 2 {
		t.Errorf("%d attempts", n)
	}
}

// TestNamesGone: a name that is unknown for a while is ridden out, or named as the cause.
func TestNamesGone(t *testing.T) {
	names, err := faultproxy.StartNames("registry.test")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := names.Close(); err != nil {
			t.Error(err)
		}
	}()
	defer func(r *net.Resolver) { net.DefaultResolver = r }(net.DefaultResolver)
	net.DefaultResolver = names.Resolver()

	p := behind(t)
	_, port, _ := strings.Cut(p.Addr(), ":")
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n", "http://registry.test:"+port))
	hosts := Hosts(t.Context(), HostOptions{CertsDir: dir})
	r := open(t, hosts, "registry.test")
	for kind, read := range reads {
		names.Forget(true)
		err := read(t.Context(), openBriefly(t, hosts, "registry.test"))
		if !errdefs.IsUnavailable(err) {
			t.Fatalf("%s: %v", kind, err)
		}
		line(t, err, "registry.test", "no such host", "check the node's name resolution")
		done := make(chan error, 1)
		sent := r.Stats().Requests
		go func() { done <- read(t.Context(), r) }()
		for pace := time.Tick(time.Millisecond); r.Stats().Requests < sent+2; { // the first has failed
			<-pace
		}
		names.Forget(false)
		if err := <-done; err != nil {
			t.Errorf("%s: not ridden out: %v", kind, err)
		}
		r.Close() // so that the name is looked up again
	}
}

// TestUntrustedTLS: a certificate of an unknown CA ends a fetch at once; when the node's configuration has the CA, the same
// repository works: a registry may change its CA while a container runs.
func TestUntrustedTLS(t *testing.T) {
	p := closing(t)(faultproxy.StartTLS(embedded(t)))
	dir := certs(t, "registry.test", fmt.Sprintf("server = %q\n", p.URL()))
	r := open(t, Hosts(t.Context(), HostOptions{CertsDir: dir}), "registry.test")
	for kind, read := range reads {
		before := r.Stats().Requests
		err := read(t.Context(), r)
		if !errdefs.IsUnavailable(err) {
			t.Fatalf("%s: %v", kind, err)
		}
		line(t, err, p.Addr(), "certificate", "CA to hosts.toml")
		if n := r.Stats().Requests - before; n != 2 {
			t.Errorf("%s: %d requests: one more with the configuration read anew, no other", kind, n)
		}
	}
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, p.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("server = %q\nca = %q\n", p.URL(), ca)
	if err := os.WriteFile(filepath.Join(dir, "registry.test", "hosts.toml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for kind, read := range reads {
		if err := read(t.Context(), r); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
