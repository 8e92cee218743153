// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/seal"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

func newEnvelope(t *testing.T) *wrap.Envelope {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "pub.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: p}), 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := wrap.NewEnvelope(t.Context(), []string{"jwe:" + path}, "")
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestPublishEncrypted: what an encrypted checkpoint opens to is what one in plain has, none of it is in the registry,
// and it shares nothing with other checkpoints, before or after it.
func TestPublishEncrypted(t *testing.T) {
	reg := newRegistry(t)
	pushBase(t, reg.ref("base/app:1"))
	src := openArchive(t, reg.ref("base/app:1")).Source
	target := publish.Target{Reference: reg.ref("cp/app:warm")}
	read := func() *publish.Image {
		t.Helper()
		r, err := publish.Publish(context.Background(), src, target)
		if err != nil {
			t.Fatal(err)
		}
		if (r.Plain > 0) != (target.Envelope != nil) {
			t.Errorf("%d bytes are said to be not encrypted", r.Plain)
		}
		img, err := publish.Read(context.Background(), r.Reference, "")
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	plain := read()
	want, err := plain.PageIndex(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	target.Envelope = newEnvelope(t)
	img := read()
	if _, err := img.PageIndex(context.Background()); !errors.Is(err, publish.ErrEncrypted) {
		t.Errorf("the page index: %v", err)
	}

	repo := reg.ref("cp/app")
	state, err := seal.Open(blob(t, repo, img.Checkpoint.State), target.Envelope.Key, seal.State)
	if err != nil || !bytes.Equal(state, blob(t, repo, plain.Checkpoint.State)) {
		t.Errorf("another state: %v", err)
	}
	p, err := seal.Open(blob(t, repo, img.Checkpoint.PageIndex), target.Envelope.Key, seal.PageIndex)
	if err != nil {
		t.Fatal(err)
	}
	keys, p, err := seal.SplitKeys(p)
	if err != nil {
		t.Fatal(err)
	}
	x, err := pageindex.Parse(p)
	if err != nil || len(x.Blobs) != len(keys) || len(x.Blobs) != len(want.Blobs) || len(img.Checkpoint.Pages) != len(keys) {
		t.Fatalf("%d blobs, %d keys, %v", len(x.Blobs), len(keys), err)
	}
	for i := range x.Blobs {
		a, b := &x.Blobs[i], &want.Blobs[i]
		if a.Digest == b.Digest || len(a.Chunks) != len(b.Chunks) || img.Checkpoint.Pages[i].Digest != a.Digest {
			t.Fatalf("blob %d: %s of %d chunks, in plain %s of %d", i, a.Digest, len(a.Chunks), b.Digest, len(b.Chunks))
		}
		sealed, raw := blob(t, repo, img.Checkpoint.Pages[i]), blob(t, repo, plain.Checkpoint.Pages[i])
		for n, c := range a.Chunks {
			frame := raw[b.Offset(n):b.Offset(n+1)]
			if bytes.Contains(sealed, frame) {
				t.Errorf("chunk %d of blob %d is in plain", n, i)
			}
			got, pages := make([]byte, c.Pages*pageindex.PageSize), make([]byte, c.Pages*pageindex.PageSize)
			if err := errors.Join(pageblob.DecodeSealed(got, c, sealed[a.Offset(n):a.Offset(n+1)], keys[i], n), pageblob.Decode(pages, b.Chunks[n], frame)); err != nil || !bytes.Equal(got, pages) {
				t.Errorf("chunk %d of blob %d: %v", n, i, err)
			}
		}
	}

	// Again: everything is sealed anew, with other keys.
	target.Envelope = newEnvelope(t)
	again := read()
	for i, p := range again.Checkpoint.Pages {
		if p.Digest == img.Checkpoint.Pages[i].Digest || again.Checkpoint.State.Digest == img.Checkpoint.State.Digest {
			t.Error("two encrypted checkpoints have content in common")
		}
	}
	// One in plain cannot use it, whether it is asked to or not.
	target.Envelope = nil
	if img = read(); img.Checkpoint.Keys != nil || strings.HasSuffix(img.Checkpoint.State.MediaType, checkpoint.EncryptedSuffix) {
		t.Error("encrypted without being asked to")
	}
	target.Envelope = newEnvelope(t)
	read()
	target.Envelope, target.Reuse = nil, []string{target.Reference}
	if _, err := publish.Publish(context.Background(), src, target); !errors.Is(err, publish.ErrEncrypted) || !strings.Contains(err.Error(), target.Reference) {
		t.Errorf("reuse of an encrypted one: %v", err)
	}
}
