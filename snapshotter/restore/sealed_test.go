// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/seal"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

// newKey makes a key pair: the public key's file, and a folder with the private one.
func newKey(t *testing.T) (public, dir string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
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
	dir = t.TempDir()
	public = filepath.Join(t.TempDir(), "pub.pem")
	if err := errors.Join(
		os.WriteFile(public, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub}), 0o600),
		os.WriteFile(filepath.Join(dir, "key.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: priv}), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	return public, dir
}

// encrypt encrypts a sample for a key, as a writer does, if there are no more keys of page blobs.
func encrypt(t *testing.T, s *sample, public string, more ...*seal.Blob) {
	t.Helper()
	e, err := wrap.NewEnvelope(t.Context(), []string{"jwe:" + public}, "")
	if err != nil {
		t.Fatal(err)
	}
	blob := seal.NewBlob(seal.NewKey())
	plain := s.index.Blobs[0]
	var raw []byte
	var chunks []pageindex.Chunk
	for i, c := range plain.Chunks {
		sealed := blob.Seal(nil, s.blobs[0][plain.Offset(i):plain.Offset(i+1)], i, c.Pages)
		c.Size = uint32(len(sealed))
		copy(c.SHA256[:], digestBytes(sealed))
		chunks, raw = append(chunks, c), append(raw, sealed...)
	}
	s.blobs[0] = raw
	if s.index.Blobs[0], err = pageindex.NewBlob(digest.FromBytes(raw), chunks); err != nil {
		t.Fatal(err)
	}
	s.spoil = func(kind string, p []byte) []byte {
		var err error
		switch kind {
		case "state":
			p, err = seal.Bytes(p, e.Key, seal.State)
		case "index":
			p, err = seal.Bytes(seal.JoinKeys(append(more, blob), p), e.Key, seal.PageIndex)
		}
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	s.manifest = func(m *v1.Manifest) {
		for i := range m.Layers {
			m.Layers[i].MediaType += checkpoint.EncryptedSuffix
			if i < 2 {
				m.Layers[i].Annotations = e.Annotations
			}
		}
	}
}

// newSealedNode is a node with a folder of keys.
func newSealedNode(t *testing.T, keys string) *node {
	t.Helper()
	n := newNode(t)
	n.stop()
	n.opts.Keys = &wrap.Keys{Dir: keys}
	n.start()
	return n
}

func (n *node) fetchAll(resp *api.PrepareResponse) error {
	return n.manager.Fetch(n.t.Context(), &api.FetchRequest{RestoreId: resp.RestoreId, Chunks: []uint32{0, 1, 2}, Urgency: api.Urgency_DEMAND})
}

// folders lists the page store's folders.
func (n *node) folders() []string {
	n.t.Helper()
	found, err := filepath.Glob(filepath.Join(n.opts.CacheDir, "pages", "*", "data"))
	if err != nil {
		n.t.Fatal(err)
	}
	return found
}

// TestEncrypted: an encrypted checkpoint is restored with its key, goes on over a restart of the daemon even
// without it, and is not restored again once the key is gone, though all of it is on the node.
func TestEncrypted(t *testing.T) {
	public, keys := newKey(t)
	n := newSealedNode(t, keys)
	s := newSample(t)
	encrypt(t, s, public)
	n.push(s)
	resp, err := n.prepare("c1", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.fetchAll(resp); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(resp.Stores[0].Data); err != nil || !bytes.Equal(data, s.pages) {
		t.Fatalf("other pages came: %v", err)
	}
	p, err := os.ReadFile(resp.PageIndex)
	if err != nil {
		t.Fatal(err)
	}
	if x, err := pageindex.Parse(p); err != nil || len(x.Blobs) != 1 {
		t.Fatalf("the laid-out index: %v", err)
	}
	// The cache on disk has what the registry has.
	if err := filepath.WalkDir(filepath.Join(n.opts.CacheDir, "metadata"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		p, err := os.ReadFile(path)
		if bytes.Contains(p, []byte("THAWPIDX")) || bytes.Contains(p, []byte("THAWKEYS")) {
			t.Errorf("%s is in plain", path)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}

	if err := os.Rename(filepath.Join(keys, "key.pem"), filepath.Join(keys, "..", "key.pem")); err != nil {
		t.Fatal(err)
	}
	if _, err := n.prepare("c2", nil); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "there is no private key in "+keys) || strings.Contains(err.Error(), "\n") {
		t.Errorf("a second restore without the key: %v", err)
	}
	n.stop()
	n.start()
	if err := os.RemoveAll(filepath.Dir(resp.Stores[0].Data)); err != nil { // fetched anew
		t.Fatal(err)
	}
	n.stop()
	n.start()
	if err := n.fetchAll(resp); err != nil {
		t.Fatalf("the first restore after restarts of the daemon: %v", err)
	}
	if data, err := os.ReadFile(resp.Stores[0].Data); err != nil || !bytes.Equal(data, s.pages) {
		t.Fatalf("other pages came after restarts: %v", err)
	}
	if _, err := n.prepare("c2", nil); !errdefs.IsPermissionDenied(err) {
		t.Errorf("a second restore without the key, after restarts: %v", err)
	}
	if err := os.Rename(filepath.Join(keys, "..", "key.pem"), filepath.Join(keys, "key.pem")); err != nil {
		t.Fatal(err)
	}
	if _, err := n.prepare("c2", nil); err != nil {
		t.Errorf("with the key again: %v", err)
	}
}

// TestEncryptedIsNotShared: an image whose index lists the chunks of an encrypted checkpoint, without having its key,
// does not get the pages that the other's restore has on the node.
func TestEncryptedIsNotShared(t *testing.T) {
	public, keys := newKey(t)
	n := newSealedNode(t, keys)
	s := newSample(t)
	encrypt(t, s, public)
	n.push(s)
	resp, err := n.prepare("victim", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.fetchAll(resp); err != nil {
		t.Fatal(err)
	}
	s.spoil, s.manifest = nil, nil // state and index in plain, the same blob
	n.push(s)
	stolen, err := n.prepare("thief", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.fetchAll(stolen); !errdefs.IsDataLoss(err) {
		t.Errorf("got %v", err)
	}
	if data, err := os.ReadFile(stolen.Stores[0].Data); err != nil || len(bytes.Trim(data, "\x00")) != 0 {
		t.Errorf("pages of the encrypted checkpoint are in %s: %v", stolen.Stores[0].Data, err)
	}
	// The same with a key of one's own.
	encrypted := newSample(t)
	encrypt(t, encrypted, public)
	encrypted.index, encrypted.blobs = s.index, s.blobs
	n.push(encrypted)
	if stolen, err = n.prepare("thief", nil); err != nil {
		t.Fatal(err)
	}
	if err := n.fetchAll(stolen); !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), "does not open") {
		t.Errorf("got %v", err)
	}
}

// TestEncryptedIsForgotten: what was in plain on the node goes with the image, but not as long as it is used.
func TestEncryptedIsForgotten(t *testing.T) {
	public, keys := newKey(t)
	n := newSealedNode(t, keys)
	s := newSample(t)
	encrypt(t, s, public)
	n.push(s)
	restore := func() *api.PrepareResponse {
		t.Helper()
		resp, err := n.prepare("c", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.fetchAll(resp); err != nil {
			t.Fatal(err)
		}
		return resp
	}
	release := func() {
		t.Helper()
		if err := n.manager.Release(t.Context(), "k8s.io/c"); err != nil {
			t.Fatal(err)
		}
	}
	there := func(resp *api.PrepareResponse, want bool, when string) {
		t.Helper()
		_, err := os.Stat(resp.ImagesDir)
		if got := err == nil; got != want || len(n.folders()) > 0 != want {
			t.Errorf("%s: state %v, pages %v", when, got, n.folders())
		}
	}
	remove := func() {
		n.images.mu.Lock()
		defer n.images.mu.Unlock()
		delete(n.images.targets, "registry.test/"+imageName)
	}
	resp := restore()
	release()
	n.manager.sweep()
	there(resp, true, "unused")
	resp = restore()
	remove()
	n.manager.sweep()
	there(resp, true, "image removed, container not")
	release()
	n.manager.sweep()
	there(resp, false, "image removed")

	// Nor is there a restart of the daemon that leaves what nobody will look for.
	n.push(s)
	resp = restore()
	release()
	n.stop()
	n.start()
	there(resp, false, "unused at a restart")

	n.stop()
	n.opts.Limits.Unused = 0
	n.start()
	resp = restore()
	release()
	there(resp, false, "laid-out state dropped")
}

// TestEncryptedRefused has a line for each way in which an encrypted checkpoint does not open.
func TestEncryptedRefused(t *testing.T) {
	public, keys := newKey(t)
	_, other := newKey(t)
	flip := func(of string, at func([]byte) int) func(*sample) {
		return func(s *sample) {
			encrypted := s.spoil
			s.spoil = func(kind string, p []byte) []byte {
				p = encrypted(kind, p)
				if kind == of {
					p[at(p)] ^= 1
				}
				return p
			}
		}
	}
	layers := func(change func(l []v1.Descriptor)) func(*sample) {
		return func(s *sample) {
			manifest := s.manifest
			s.manifest = func(m *v1.Manifest) { manifest(m); change(m.Layers) }
		}
	}
	last := func(p []byte) int { return len(p) - 1 }
	for name, tc := range map[string]struct {
		keys  string
		spoil func(*sample)
		is    func(error) bool
		want  string
	}{
		"no key":          {keys: filepath.Join(keys, "none"), is: errdefs.IsPermissionDenied, want: "encrypted for \"jwe ECDH-ES+A256KW\" and this node cannot open it (there is no private key in"},
		"another key":     {keys: other, is: errdefs.IsPermissionDenied, want: "none of the 1 private keys in " + other + " opens it"},
		"state changed":   {keys: keys, spoil: flip("state", last), is: errdefs.IsDataLoss, want: "encrypted content does not open: it was changed, or its key is another: segment 0"},
		"index changed":   {keys: keys, spoil: flip("index", last), is: errdefs.IsDataLoss, want: "page index: encrypted content does not open"},
		"another version": {keys: keys, spoil: flip("index", func([]byte) int { return 8 }), is: errdefs.IsDataLoss, want: "version 0 is not supported"},
		"index and state swapped": {keys: keys, is: errdefs.IsDataLoss, want: "does not open", spoil: func(s *sample) {
			encrypted := s.spoil
			s.spoil = func(kind string, p []byte) []byte {
				return encrypted(map[string]string{"state": "index", "index": "state"}[kind], p)
			}
		}},
		"a key too many": {keys: keys, is: errdefs.IsDataLoss, want: "page index has 1 page blobs and 2 keys", spoil: func(s *sample) {
			*s = *newSample(t)
			encrypt(t, s, public, seal.NewBlob(seal.NewKey()))
		}},
		"partly in plain": {
			keys: keys, is: errdefs.IsDataLoss, want: "2 of 3 layers are encrypted",
			spoil: layers(func(l []v1.Descriptor) { l[2].MediaType = checkpoint.MediaTypePages }),
		},
		"no wrapped key": {
			keys: keys, is: errdefs.IsDataLoss, want: "page index: invalid annotations of an encrypted checkpoint: there is no key",
			spoil: layers(func(l []v1.Descriptor) { l[1].Annotations = nil }),
		},
		"two keys": {keys: keys, is: errdefs.IsDataLoss, want: "different keys", spoil: layers(func(l []v1.Descriptor) {
			e, err := wrap.NewEnvelope(t.Context(), []string{"jwe:" + public}, "")
			if err != nil {
				t.Fatal(err)
			}
			l[0].Annotations = e.Annotations
		})},
	} {
		t.Run(name, func(t *testing.T) {
			n := newSealedNode(t, tc.keys)
			s := newSample(t)
			encrypt(t, s, public)
			if tc.spoil != nil {
				tc.spoil(s)
			}
			n.push(s)
			_, err := n.prepare("c", nil)
			if err == nil || !tc.is(err) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v, want one classed line with %q", err, tc.want)
			}
			n.nothingLeft()
		})
	}
	t.Run("a chunk changed", func(t *testing.T) {
		n := newSealedNode(t, keys)
		s := newSample(t)
		encrypt(t, s, public)
		// As somebody could do it who may write to the registry: with the digests that belong to it.
		b := s.index.Blobs[0]
		s.blobs[0][0] ^= 1
		copy(b.Chunks[0].SHA256[:], digestBytes(s.blobs[0][:b.Offset(1)]))
		b.Digest = digest.FromBytes(s.blobs[0])
		s.index.Blobs[0] = b
		n.push(s)
		resp, err := n.prepare("c", nil)
		if err != nil {
			t.Fatal(err)
		}
		err = n.fetchAll(resp)
		if !errdefs.IsDataLoss(err) || !strings.Contains(err.Error(), "encrypted content does not open: it was changed") || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v", err)
		}
	})
}
