// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// keysDir is where the daemon looks for keys if its configuration does not say otherwise.
const keysDir = "/etc/containerd/ocicrypt/keys"

// keyPair writes a key pair's halves to files.
func keyPair(t *testing.T) (public, private string) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	priv, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public, private = filepath.Join(t.TempDir(), "public.pem"), filepath.Join(t.TempDir(), "private.pem")
	if err := errors.Join(
		os.WriteFile(public, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub}), 0o600),
		os.WriteFile(private, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: priv}), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	return public, private
}

// giveKey makes a private key the only one that the node has; "" takes it away.
func giveKey(t *testing.T, private string) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(keysDir), os.MkdirAll(keysDir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if private == "" {
		return
	}
	p, err := os.ReadFile(private)
	if err == nil {
		err = os.WriteFile(filepath.Join(keysDir, "node.pem"), p, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// blobs lists the files of the registry's blobs.
func blobs(t *testing.T, s *stack.Stack) map[string]bool {
	t.Helper()
	found, err := filepath.Glob(s.Registry.BlobPath("*"))
	if err != nil || len(found) == 0 {
		t.Fatalf("the registry's blobs: %v, %v", found, err)
	}
	out := make(map[string]bool, len(found))
	for _, path := range found {
		out[path] = true
	}
	return out
}

// search counts the files that have each of some words in them, as they are or decompressed.
func search(t *testing.T, files map[string]bool, words ...string) map[string]int {
	t.Helper()
	found := make(map[string]int)
	for path := range files {
		p, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		z, err := zstd.NewReader(bytes.NewReader(p))
		if err != nil {
			t.Fatal(err)
		}
		plain, _ := io.ReadAll(z) // up to where it is no zstd stream
		z.Close()
		for _, w := range words {
			if bytes.Contains(p, []byte(w)) || bytes.Contains(plain, []byte(w)) {
				found[w]++
			}
		}
	}
	return found
}

// TestEncrypted: nothing of a process's memory is in the registry; a node that has the key restores the checkpoint,
// also one that skopeo has copied; a node that has none, or another, refuses.
func TestEncrypted(t *testing.T) {
	ctx, s := start(t, workloads.Node)
	t.Cleanup(func() {
		if err := os.RemoveAll(keysDir); err != nil {
			t.Error(err)
		}
	})
	public, private := keyPair(t)
	other, otherPrivate := keyPair(t)
	w := all[workloads.Node]
	// A variable is in the state, with the process's stack and its spec; names of items are in lazy memory.
	secret, item := rand.Text(), "item 123456"
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	env := maps.Clone(w.env)
	if env == nil {
		env = make(map[string]string)
	}
	env["SECRET"] = secret
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Node), Env: env})
	if err != nil {
		t.Fatal(err)
	}
	if w.warm != nil {
		if err := w.warm(ctx, pod, c); err != nil {
			t.Fatal(err)
		}
	}
	before, err := w.observe(ctx, pod, c)
	if err != nil {
		t.Fatal(err)
	}
	known := blobs(t, s)
	added := func() map[string]bool {
		now := blobs(t, s)
		maps.DeleteFunc(now, func(path string, _ bool) bool { return known[path] })
		maps.Copy(known, now)
		return now
	}
	push := func(name string, recipients ...string) string {
		t.Helper()
		ref := s.Registry.Ref("checkpoints/" + name)
		args := []string{"checkpoint", c.ID, "--leave-running", "--push", ref}
		for _, r := range recipients {
			args = append(args, "--encrypt-for", "jwe:"+r)
		}
		if _, err := thaw(ctx, s, args...); err != nil {
			t.Fatal(err)
		}
		return ref
	}
	both := push("for-both:1", public, other)
	if found := search(t, added(), secret, item, "THAWPIDX"); len(found) != 0 {
		t.Errorf("an encrypted checkpoint has this in plain: %v", found)
	}
	alone := push("for-one:1", public)
	added()
	// The search does find them where they are.
	push("for-all:1")
	if found := search(t, added(), secret, item, "THAWPIDX"); found[secret] == 0 || found[item] == 0 || found["THAWPIDX"] == 0 {
		t.Errorf("in a checkpoint in plain was found: %v", found)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if out, err := thaw(ctx, s, "inspect", both); err != nil || strings.Count(out, "jwe RSA-OAEP") != 2 || strings.Contains(out, secret) {
		t.Errorf("thaw inspect: %v: %s", err, out)
	}

	giveKey(t, "")
	says(t, refused(ctx, t, s, both, stack.PodOptions{}, stack.ContainerOptions{}), both, "encrypted for", "jwe RSA-OAEP", "there is no private key in "+keysDir)
	giveKey(t, otherPrivate)
	says(t, refused(ctx, t, s, alone, stack.PodOptions{}, stack.ContainerOptions{}), alone, "none of the 1 private keys in "+keysDir)
	copied := s.Registry.Ref("copied/node:1")
	if out, err := exec.CommandContext(ctx, "skopeo", "copy", "--all", "--src-tls-verify=false", "--dest-tls-verify=false", "docker://"+both, "docker://"+copied).CombinedOutput(); err != nil {
		t.Fatalf("skopeo: %v: %s", err, out)
	}
	for _, tc := range []struct{ ref, key string }{{both, otherPrivate}, {alone, private}, {copied, private}} {
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
		giveKey(t, tc.key)
		pod, c := restore(ctx, t, s, tc.ref, stack.ContainerOptions{})
		observed(ctx, t, workloads.Node, before, pod, c)
		// The key is needed for each restore, though all of the image is on the node.
		giveKey(t, "")
		says(t, refused(ctx, t, s, tc.ref, stack.PodOptions{}, stack.ContainerOptions{}), "there is no private key")
		if err := pod.Remove(ctx); err != nil {
			t.Fatal(err)
		}
	}
}
