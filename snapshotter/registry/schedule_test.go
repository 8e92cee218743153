// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
)

// clocked answers at once and notes when it was asked. Time is that of the bubble it is used in.
type clocked struct {
	began  time.Time
	header http.Header

	mu    sync.Mutex
	asked []time.Duration
}

func (c *clocked) RoundTrip(r *http.Request) (*http.Response, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked = append(c.asked, time.Since(c.began))
	return &http.Response{StatusCode: 503, Header: c.header, Body: io.NopCloser(strings.NewReader("")), Request: r}, nil
}

// schedule returns when hosts are asked for pages that never come.
func schedule(t *testing.T, retryAfter ...string) (asked [][]time.Duration, took time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var transports []*clocked
		c := New(Options{Timeout: time.Minute, StallTimeout: 10 * time.Second, Hosts: func(string) ([]docker.RegistryHost, error) {
			var hosts []docker.RegistryHost
			for i, after := range retryAfter {
				rt := &clocked{began: began, header: http.Header{}}
				if after != "" {
					rt.header.Set("Retry-After", after)
				}
				transports = append(transports, rt)
				hosts = append(hosts, docker.RegistryHost{
					Client: &http.Client{Transport: rt}, Host: string(rune('a'+i)) + ".test", Scheme: "http", Path: "/v2", Capabilities: docker.HostCapabilityPull,
				})
			}
			return hosts, nil
		}})
		r, err := c.Repository("registry.test/" + repoName + ":tag")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Length: 10}); err == nil {
			t.Fatal("no error")
		}
		took = time.Since(began)
		for _, rt := range transports {
			asked = append(asked, rt.asked)
		}
	})
	return asked, took
}

// TestSchedule: waits grow up to a bound, differ from one fetch to the next, and the last attempt is just before the end.
func TestSchedule(t *testing.T) {
	asked, took := schedule(t, "")
	if took > time.Minute {
		t.Errorf("given up after %v", took)
	}
	at := asked[0]
	if len(at) < 10 || len(at) > 30 || at[len(at)-1] != 59*time.Second {
		t.Fatalf("asked at %v", at)
	}
	wait := 100 * time.Millisecond
	for i := 1; i < len(at)-1; i++ {
		if got := at[i] - at[i-1]; got < wait || got >= wait*3/2 {
			t.Errorf("wait %d is %v, not %v and up to half more", i, got, wait)
		}
		wait = min(2*wait, 3200*time.Millisecond)
	}
	if again, _ := schedule(t, ""); again[0][1] == at[1] && again[0][2] == at[2] && again[0][3] == at[3] {
		t.Errorf("no jitter: twice %v", at[:4])
	}
}

// TestRetryAfter: what a host asks for is honoured as far as there is time, and holds for that host alone.
func TestRetryAfter(t *testing.T) {
	asked, _ := schedule(t, "7")
	for i, at := range asked[0][1 : len(asked[0])-1] {
		if got := at - asked[0][i]; got < 7*time.Second || got > 12*time.Second {
			t.Errorf("wait %d is %v although 7 s were asked for", i, got)
		}
	}
	asked, took := schedule(t, "3600")
	if at := asked[0]; len(at) != 2 || at[1] != 59*time.Second || took > time.Minute {
		t.Errorf("asked at %v, given up after %v", at, took)
	}
	asked, _ = schedule(t, "3600", "")
	if len(asked[0]) != 2 || len(asked[1]) < 10 {
		t.Errorf("the one that wants an hour was asked at %v, the other at %v", asked[0], asked[1])
	}
}

// TestRetryAfterIsShared: a host that asked one fetch to wait is not asked by the next.
func TestRetryAfterIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := &clocked{began: time.Now(), header: http.Header{"Retry-After": {"20"}}}
		c := New(Options{Timeout: time.Minute, StallTimeout: 10 * time.Second, Hosts: func(string) ([]docker.RegistryHost, error) {
			return []docker.RegistryHost{{Client: &http.Client{Transport: rt}, Host: "a.test", Scheme: "http", Path: "/v2", Capabilities: docker.HostCapabilityPull}}, nil
		}})
		r, err := c.Repository("registry.test/" + repoName + ":tag")
		if err != nil {
			t.Fatal(err)
		}
		ask := func() { _, _ = r.Open(t.Context(), Range{Digest: dgst, Size: desc.Size, Length: 10}) }
		go ask()
		synctest.Wait() // it has been told to wait
		go ask()
		synctest.Wait()
		rt.mu.Lock()
		if len(rt.asked) != 1 {
			t.Errorf("asked at %v", rt.asked)
		}
		rt.mu.Unlock()
		time.Sleep(2 * time.Minute)
	})
}
