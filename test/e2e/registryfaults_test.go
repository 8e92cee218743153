// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/test/faultproxy"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// impatient is a daemon that gives up soon.
const impatient = "[registry]\ntimeout = \"4s\"\nmetadata_timeout = \"2s\"\nstall_timeout = \"500ms\"\n"

// routed has the node ask proxies for what is in the stack's registry, the first one first.
func routed(t *testing.T, s *stack.Stack, proxies ...*faultproxy.Proxy) {
	t.Helper()
	path := filepath.Join("/etc/containerd/certs.d", s.Registry.Addr(), "hosts.toml")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := len(proxies) - 1
	text := fmt.Sprintf("server = %q\n", proxies[last].URL())
	for _, p := range proxies[:last] {
		text += fmt.Sprintf("[host.%q]\n", p.URL())
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, before, 0o644); err != nil {
			t.Error(err)
		}
	})
}

// proxied starts a proxy in front of the stack's registry.
func proxied(t *testing.T, s *stack.Stack) *faultproxy.Proxy {
	t.Helper()
	p, err := faultproxy.Start(s.Registry.Addr())
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

// killed has a program touch all of its memory and checks that it is killed before it sees a wrong page, with a reason in its log.
func killed(ctx context.Context, t *testing.T, pod *stack.Pod, c *stack.Container, words ...string) {
	t.Helper()
	task, err := c.Task(ctx)
	if err != nil {
		t.Fatal(err)
	}
	exit, err := task.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ask, cancel := context.WithCancel(ctx)
	defer cancel()
	replied := make(chan string, 1)
	go func() {
		reply, _ := get(ask, pod, "/verify")
		replied <- reply
	}()
	if e := <-exit; e.ExitCode() != 137 {
		t.Errorf("exit code %d: %v", e.ExitCode(), e.Error())
	}
	cancel()
	if reply := <-replied; reply != "" {
		t.Errorf("the server answered: %s", reply)
	}
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	const mark = "thaw: killing the container: "
	for {
		text, err := c.Log()
		if _, reason, ok := strings.Cut(text, mark); ok && err == nil {
			says(t, strings.TrimRight(reason, "\n"), words...)
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("no reason in the container's log: %q, %v", text, err)
		case <-pace.C:
		}
	}
}

// TestRegistryFaultsAtStart: what stays wrong while a container is started ends the start, with one line that has cause and remedy.
func TestRegistryFaultsAtStart(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	if err := s.RestartDaemon(ctx, impatient); err != nil {
		t.Fatal(err)
	}
	defer asBefore(ctx, t, s)
	p := proxied(t, s)
	routed(t, s, p)
	tokens := faultproxy.NewTokens()
	tokens.Deny(true)
	signer := faultproxy.NewSigner(p.URL())
	for name, tc := range map[string]struct {
		fault faultproxy.Fault
		words []string
	}{
		"reset":      {faultproxy.Reset(0), []string{"connection reset", "check that the registry runs"}},
		"stall":      {faultproxy.Stall(0), []string{"no byte arrived in time", "network"}},
		"truncated":  {faultproxy.Blobs(faultproxy.Truncate(10)), []string{"broke off", "check that the registry runs"}},
		"damaged":    {faultproxy.Blobs(faultproxy.Damage()), []string{"digest", "push the checkpoint image again"}},
		"no ranges":  {faultproxy.Blobs(faultproxy.Unranged()), []string{"ignores byte ranges", "registry or mirror that serves ranges"}},
		"401":        {tokens.Guard, []string{"401", "docker_config"}},
		"403":        {faultproxy.Status(403), []string{"403", "docker_config"}},
		"404":        {faultproxy.Blobs(faultproxy.Status(404)), []string{"404", "push the checkpoint image again"}},
		"429":        {faultproxy.Status(429, "Retry-After: 1000"), []string{"429", "mirror"}},
		"503":        {faultproxy.Status(503), []string{"503", "mirror"}},
		"signed 403": {faultproxy.Chain(faultproxy.Blobs(onlyUnsigned(signer.Redirect)), onlySigned(faultproxy.Status(403))), []string{"403", "storage", "clock"}},
	} {
		t.Run(name, func(t *testing.T) {
			p.Inject(tc.fault)
			says(t, refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{Env: synthetic}), append(tc.words, p.Addr())...)
			p.Inject(nil)
			if err := s.ClearThawCache(ctx); err != nil {
				t.Fatal(err)
			}
		})
	}
	t.Run("down", func(t *testing.T) {
		if err := p.Down(); err != nil {
			t.Fatal(err)
		}
		says(t, refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{Env: synthetic}), p.Addr(), "connection refused", "check that the registry runs")
		if err := p.Up(); err != nil {
			t.Fatal(err)
		}
	})
	pod, _ := lazily(ctx, t, s, ref)
	if err := verify(ctx, pod); err != nil {
		t.Errorf("without a fault: %v", err)
	}
}

// onlySigned and onlyUnsigned tell a registry and its storage at one address apart.
func onlySigned(f faultproxy.Fault) faultproxy.Fault { return bySignature(f, true) }

func onlyUnsigned(f faultproxy.Fault) faultproxy.Fault { return bySignature(f, false) }

func bySignature(f faultproxy.Fault, signed bool) faultproxy.Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.URL.Query().Has("signature") == signed {
			f(w, r, next)
			return
		}
		next.ServeHTTP(w, r)
	}
}

// asBefore undoes RestartDaemon.
func asBefore(ctx context.Context, t *testing.T, s *stack.Stack) {
	t.Helper()
	if err := s.RestartDaemon(context.WithoutCancel(ctx), ""); err != nil {
		t.Error(err)
	}
}

// TestRegistryFaultsPass: a container that needs its memory while something is wrong for a while gets the right one.
func TestRegistryFaultsPass(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	if err := s.RestartDaemon(ctx, impatient); err != nil {
		t.Fatal(err)
	}
	defer asBefore(ctx, t, s)
	// right restores, has something go wrong, and checks all memory.
	right := func(t *testing.T, wrong func()) {
		t.Helper()
		pod, _ := lazily(ctx, t, s, ref)
		if _, err := get(ctx, pod, "/touch"); err != nil {
			t.Fatal(err)
		}
		wrong()
		if err := verify(ctx, pod); err != nil {
			t.Error(err)
		}
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for name, fault := range map[string]faultproxy.Fault{
		"reset":     faultproxy.First(3, faultproxy.Reset(30_000)),
		"stall":     faultproxy.First(3, faultproxy.Stall(30_000)),
		"truncated": faultproxy.First(3, faultproxy.Truncate(30_000)),
		"damaged":   faultproxy.First(1, faultproxy.Damage()),
		"range":     faultproxy.First(1, faultproxy.Elsewhere()),
		"429":       faultproxy.First(3, faultproxy.Status(429, "Retry-After: 1")),
		"503":       faultproxy.First(3, faultproxy.Status(503)),
	} {
		t.Run(name, func(t *testing.T) {
			p := proxied(t, s)
			routed(t, s, p)
			right(t, func() { p.Inject(fault) })
		})
	}
	t.Run("mirror damaged", func(t *testing.T) {
		mirror, origin := proxied(t, s), proxied(t, s)
		routed(t, s, mirror, origin)
		right(t, func() { mirror.Inject(faultproxy.Damage()) })
		if len(origin.Requests()) == 0 {
			t.Error("the registry was not asked")
		}
	})
	t.Run("mirror down", func(t *testing.T) {
		mirror, origin := proxied(t, s), proxied(t, s)
		routed(t, s, mirror, origin)
		right(t, func() {
			for _, r := range origin.Requests() {
				if strings.Contains(r.Path, "/blobs/") {
					t.Errorf("the registry was asked although there was a mirror: %+v", r)
				}
			}
			if err := mirror.Down(); err != nil {
				t.Error(err)
			}
		})
	})
	t.Run("connections forgotten", func(t *testing.T) {
		p := proxied(t, s)
		routed(t, s, p)
		right(t, p.Forget)
	})
	t.Run("token revoked", func(t *testing.T) {
		p, tokens := proxied(t, s), faultproxy.NewTokens()
		p.Inject(tokens.Guard)
		routed(t, s, p)
		issued := 0
		right(t, func() {
			tokens.Revoke(http.StatusUnauthorized)
			issued = tokens.Issued()
		})
		if n := tokens.Issued() - issued; n != 1 {
			t.Errorf("%d new tokens for one that was revoked", n)
		}
	})
	t.Run("signed address expired", func(t *testing.T) {
		p, storage := proxied(t, s), proxied(t, s)
		signer := faultproxy.NewSigner(storage.URL())
		p.Inject(faultproxy.Blobs(signer.Redirect))
		storage.Inject(signer.Check)
		routed(t, s, p)
		issued := 0
		right(t, func() {
			signer.Expire()
			issued = signer.Issued()
		})
		if signer.Issued() == issued || len(storage.Requests()) == 0 {
			t.Error("the storage was not used")
		}
	})
}

// TestRegistryFaultsKill: a page that cannot be had in time ends the container with the reason; it never sees a wrong one.
func TestRegistryFaultsKill(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	if err := s.RestartDaemon(ctx, impatient); err != nil {
		t.Fatal(err)
	}
	defer asBefore(ctx, t, s)
	tokens := faultproxy.NewTokens()
	for name, tc := range map[string]struct {
		before faultproxy.Fault
		wrong  func(*faultproxy.Proxy)
		words  []string
	}{
		"stall":   {wrong: func(p *faultproxy.Proxy) { p.Inject(faultproxy.Stall(0)) }, words: []string{"no byte arrived in time", "network"}},
		"damaged": {wrong: func(p *faultproxy.Proxy) { p.Inject(faultproxy.Damage()) }, words: []string{"its digest is", "push the checkpoint image again"}},
		"range":   {wrong: func(p *faultproxy.Proxy) { p.Inject(faultproxy.Elsewhere()) }, words: []string{"instead of", "proxy"}},
		"403":     {wrong: func(p *faultproxy.Proxy) { p.Inject(faultproxy.Status(403)) }, words: []string{"403", "docker_config"}},
		"503":     {wrong: func(p *faultproxy.Proxy) { p.Inject(faultproxy.Status(503)) }, words: []string{"503", "mirror"}},
		"401": {before: tokens.Guard, wrong: func(*faultproxy.Proxy) {
			tokens.Deny(true)
		}, words: []string{"401", "docker_config"}},
		"down": {wrong: func(p *faultproxy.Proxy) {
			if err := p.Down(); err != nil {
				t.Error(err)
			}
		}, words: []string{"connection refused", "check that the registry runs"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := proxied(t, s)
			p.Inject(tc.before)
			routed(t, s, p)
			pod, c := lazily(ctx, t, s, ref)
			tc.wrong(p)
			killed(ctx, t, pod, c, append(tc.words, p.Addr())...)
			if err := pod.Remove(ctx); err != nil {
				t.Error(err)
			}
			if err := s.ClearThawCache(ctx); err != nil {
				t.Fatal(err)
			}
		})
	}
	t.Run("deleted", func(t *testing.T) { // the last: the image is gone then
		pod, c := lazily(ctx, t, s, ref)
		f := takeApart(ctx, t, ref)
		for _, l := range f.manifest.Layers {
			if l.MediaType == checkpoint.MediaTypePages {
				req, err := http.NewRequestWithContext(ctx, http.MethodDelete, "http://"+s.Registry.Addr()+"/v2/"+f.repo.RepositoryStr()+"/blobs/"+l.Digest.String(), nil)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
			}
		}
		killed(ctx, t, pod, c, "404", "push the checkpoint image again", s.Registry.Addr())
		if err := pod.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
}
