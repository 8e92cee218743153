// SPDX-License-Identifier: Apache-2.0

//go:build linux

package link

import (
	"bytes"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"thaw.dev/thaw/test/stack/isolate"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Exit(0)
	}
	isolate.Enter()
	os.Exit(m.Run())
}

var shape = Shape{Rate: 125e6, RoundTrip: time.Millisecond}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := Listen(t.Context(), "127.0.0.1:0", shape)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func dial(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestNeverFaster: neither bytes nor round trips beat the link; that they are not much slower is for benchmarks to tell.
func TestNeverFaster(t *testing.T) {
	l := listen(t)
	content := make([]byte, 16<<20)
	rand.NewChaCha8([32]byte{1}).Read(content)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				one := make([]byte, 1)
				for {
					if _, err := io.ReadFull(c, one); err != nil {
						return
					}
					answer := one
					if one[0] == 'a' {
						answer = content
					}
					if _, err := c.Write(answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	began := time.Now()
	c := dial(t, l)
	if took := time.Since(began); took < shape.RoundTrip {
		t.Errorf("connected in %v, the round trip is %v", took, shape.RoundTrip)
	}
	fastest := time.Hour
	for range 20 {
		began = time.Now()
		if _, err := c.Write([]byte("e")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		fastest = min(fastest, time.Since(began))
	}
	if fastest < shape.RoundTrip {
		t.Errorf("round trip in %v, it takes %v", fastest, shape.RoundTrip)
	}
	began = time.Now()
	if _, err := c.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(content))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if least := time.Duration(float64(len(content)) / float64(shape.Rate) * float64(time.Second)); took < least {
		t.Errorf("%d bytes in %v, the link needs %v", len(content), took, least)
	}
	if sha256.Sum256(got) != sha256.Sum256(content) {
		t.Error("other bytes arrived")
	}
	t.Logf("round trip %v, %.1f MB/s", fastest, float64(len(content))/took.Seconds()/1e6)
}

// TestEnds: a closed link leaves no rule and delays nothing, also where a connection is still open.
func TestEnds(t *testing.T) {
	l := listen(t)
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			accepted <- c
		}
	}()
	c := dial(t, l)
	server := <-accepted
	defer server.Close()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	rules, err := exec.Command("iptables", "-S").CombinedOutput()
	if err != nil || strings.Contains(string(rules), "NFQUEUE") {
		t.Errorf("rules after the end: %v\n%s", err, rules)
	}
	if _, err := server.Write([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 10)
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, []byte("still here")) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestNoSuchShape(t *testing.T) {
	for _, s := range []Shape{{}, {Rate: -1}, {Rate: 1, RoundTrip: -1}} {
		if l, err := Listen(t.Context(), "127.0.0.1:0", s); err == nil {
			l.Close()
			t.Errorf("%+v was taken", s)
		}
	}
}
