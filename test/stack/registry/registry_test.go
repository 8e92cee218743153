// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

func start(t *testing.T) *Registry {
	t.Helper()
	r, err := Start("127.0.0.1:0", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func reference(t *testing.T, r *Registry, n string) name.Reference {
	t.Helper()
	ref, err := name.ParseReference(r.Ref(n), name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// push puts an image of one random layer into the registry and gives back the layer's digest.
func push(t *testing.T, r *Registry, n string, size int64) v1.Hash {
	t.Helper()
	image, err := random.Image(size, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(reference(t, r, n), image); err != nil {
		t.Fatal(err)
	}
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	return digest
}

func TestRange(t *testing.T) {
	r := start(t)
	digest := push(t, r, "team/app:1", 3<<20)
	r.Reset()
	for _, test := range []struct {
		header string
		status int
		length int64
	}{
		{"", http.StatusOK, -1},
		{"bytes=10-19", http.StatusPartialContent, 10},
		{"bytes=-7", http.StatusPartialContent, 7},
		{"bytes=99999999-", http.StatusRequestedRangeNotSatisfiable, -1},
	} {
		req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s/v2/team/app/blobs/%s", r.Addr(), digest), nil)
		if err != nil {
			t.Fatal(err)
		}
		if test.header != "" {
			req.Header.Set("Range", test.header)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != test.status || test.length >= 0 && int64(len(body)) != test.length {
			t.Errorf("%q: status %d, %d bytes, error %v", test.header, resp.StatusCode, len(body), err)
		}
		last := r.Requests()[len(r.Requests())-1]
		if last.Sent != int64(len(body)) || last.Repository != "team/app" || last.Status != test.status {
			t.Errorf("%q: recorded %+v, got %d bytes", test.header, last, len(body))
		}
	}
	if got := r.Traffic(InRepository("team/app")); got.Requests != 4 || got.Sent < 3<<20+17 {
		t.Errorf("traffic: %+v", got)
	}
}

func TestBlobsNeedMountInOtherRepository(t *testing.T) {
	r := start(t)
	digest := push(t, r, "a:1", 1<<16)
	url := fmt.Sprintf("http://%s/v2/b/blobs/%s", r.Addr(), digest)
	head := func() int {
		resp, err := http.Head(url)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := head(); got != http.StatusNotFound {
		t.Errorf("before: status %d", got)
	}
	image, err := remote.Image(reference(t, r, "a:1"))
	if err != nil {
		t.Fatal(err)
	}
	r.Reset()
	if err := remote.Write(reference(t, r, "b:1"), image); err != nil {
		t.Fatal(err)
	}
	if got := head(); got != http.StatusOK {
		t.Errorf("after: status %d", got)
	}
	if got := r.Traffic(InRepository("b")); got.Received > 16<<10 {
		t.Errorf("the layer was uploaded, not mounted: %+v", got)
	}
}

func TestWrongDigestIsRefused(t *testing.T) {
	r := start(t)
	url := fmt.Sprintf("http://%s/v2/a/blobs/uploads/?digest=sha256:%064d", r.Addr(), 1)
	resp, err := http.Post(url, "application/octet-stream", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("status %d", resp.StatusCode)
	}
}

func TestIntercept(t *testing.T) {
	r := start(t)
	r.Intercept(func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	})
	resp, err := http.Get("http://" + r.Addr() + "/v2/")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusTeapot {
		t.Errorf("status %d", resp.StatusCode)
	}
}
