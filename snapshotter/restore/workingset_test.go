// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/workingset"
)

// encode encodes a set of chunks of the first blob.
func encode(t *testing.T, checkpoint string, partial bool, chunks ...uint32) []byte {
	t.Helper()
	s := workingset.Set{Checkpoint: digest.Digest(checkpoint), Partial: partial}
	for _, c := range chunks {
		s.Chunks = append(s.Chunks, workingset.Chunk{Chunk: c})
	}
	p, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// present waits until nothing is under way and returns which of three chunks are there.
func (n *node) present(id string) string {
	n.t.Helper()
	n.manager.wg.Wait()
	r, err := n.manager.get(id)
	if err != nil {
		n.t.Fatal(err)
	}
	var out strings.Builder
	for i := range 3 {
		if r.blobs[0].Present(i) {
			fmt.Fprint(&out, i)
		}
	}
	return out.String()
}

// forget ends a restore and makes the page store cold, by a restart of the daemon.
func (n *node) forget(id string) {
	n.t.Helper()
	if err := n.manager.Release(n.t.Context(), id); err != nil {
		n.t.Fatal(err)
	}
	n.stop()
	if err := os.RemoveAll(filepath.Join(n.opts.CacheDir, "pages")); err != nil {
		n.t.Fatal(err)
	}
	n.start()
}

// TestWorkingSet: what a restore touched first is there when the next one begins, on a node that has restarted.
func TestWorkingSet(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	resp, err := n.prepare("c", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := n.present(resp.RestoreId); got != "" {
		t.Fatalf("chunks %s are there without a working set", got)
	}
	if _, err := n.manager.Expected(t.Context(), resp.RestoreId); !errdefs.IsNotFound(err) {
		t.Fatalf("something is expected without a working set: %v", err)
	}
	if _, err := n.manager.WorkingSet(t.Context(), resp.Digest); !errdefs.IsNotFound(err) {
		t.Fatalf("a set before it was recorded: %v", err)
	}
	for name, bad := range map[string][]byte{
		"garbage":            []byte("garbage"),
		"another checkpoint": encode(t, digest.FromString("other").String(), false, 1),
	} {
		if err := n.manager.Record(t.Context(), resp.RestoreId, bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Chunks that do not exist are passed over.
	if err := n.manager.Record(t.Context(), resp.RestoreId, encode(t, resp.Digest, false, 2, 77, 0)); err != nil {
		t.Fatal(err)
	}
	if p, err := n.manager.WorkingSet(t.Context(), resp.Digest); err != nil || string(p) != string(encode(t, resp.Digest, false, 2, 0)) {
		t.Fatalf("%x, %v", p, err)
	}
	if _, err := n.manager.Report(t.Context(), &api.Status{RestoreId: resp.RestoreId, State: StateRestoring, RecordedChunks: 9}); err != nil {
		t.Fatal(err)
	}
	if list := n.manager.List(); len(list) != 1 || list[0].RecordedChunks != 2 {
		t.Errorf("%+v", list)
	}
	n.forget(resp.RestoreId)
	if resp, err = n.prepare("c", nil); err != nil {
		t.Fatal(err)
	}
	if got := n.present(resp.RestoreId); got != "02" {
		t.Fatalf("chunks %q are there", got)
	}
	if set, err := n.manager.Expected(t.Context(), resp.RestoreId); err != nil || string(set) != string(encode(t, resp.Digest, false, 2, 0)) {
		t.Errorf("%x is expected: %v", set, err)
	}
	n.forget(resp.RestoreId)
	if resp, err = n.prepare("c", func(s *specs.Spec) { s.Annotations[AnnotationWorkingSet] = "record" }); err != nil {
		t.Fatal(err)
	}
	if got := n.present(resp.RestoreId); got != "" {
		t.Errorf("chunks %q are there although the set is to be recorded anew", got)
	}
	if _, err := n.manager.Expected(t.Context(), resp.RestoreId); !errdefs.IsNotFound(err) {
		t.Errorf("something is expected although the set is to be recorded anew: %v", err)
	}
	// What is recorded next replaces it.
	if err := n.manager.Record(t.Context(), resp.RestoreId, encode(t, resp.Digest, false, 1)); err != nil {
		t.Fatal(err)
	}
	n.forget(resp.RestoreId)
	if resp, err = n.prepare("c", nil); err != nil {
		t.Fatal(err)
	}
	if got := n.present(resp.RestoreId); got != "1" {
		t.Fatalf("chunks %q are there", got)
	}
	if err := n.manager.Record(t.Context(), "nobody", nil); !errdefs.IsNotFound(err) {
		t.Errorf("a restore that is not known: %v", err)
	}
}

// refer publishes a set in the way of registries without the referrers API. Its manifest may be spoiled.
func (n *node) refer(index digest.Digest, spoil func(*v1.Manifest), sets ...[]byte) {
	n.t.Helper()
	list := v1.Index{MediaType: v1.MediaTypeImageIndex}
	list.SchemaVersion = 2
	for i, set := range sets {
		layer := v1.Descriptor{MediaType: workingset.MediaType, Digest: digest.FromBytes(set), Size: int64(len(set))}
		n.upload(http.MethodPost, "/v2/team/app/blobs/uploads/?digest="+layer.Digest.String(), "application/octet-stream", set)
		m := v1.Manifest{
			MediaType: v1.MediaTypeImageManifest, ArtifactType: workingset.ArtifactType, Layers: []v1.Descriptor{layer},
			Annotations: map[string]string{v1.AnnotationCreated: fmt.Sprintf("2026-01-%02dT00:00:00Z", i+1)},
		}
		m.SchemaVersion = 2
		if spoil != nil {
			spoil(&m)
		}
		p, err := json.Marshal(m)
		if err != nil {
			n.t.Fatal(err)
		}
		d := v1.Descriptor{MediaType: m.MediaType, ArtifactType: m.ArtifactType, Annotations: m.Annotations, Digest: digest.FromBytes(p), Size: int64(len(p))}
		n.upload(http.MethodPut, "/v2/team/app/manifests/"+d.Digest.String(), d.MediaType, p)
		list.Manifests = append(list.Manifests, d)
	}
	p, err := json.Marshal(list)
	if err != nil {
		n.t.Fatal(err)
	}
	n.upload(http.MethodPut, "/v2/team/app/manifests/"+strings.Replace(index.String(), ":", "-", 1), list.MediaType, p)
}

// TestPublishedWorkingSet: a node that has restored the image never before uses the newest set beside it; sets that are
// wrong are nobody's failure.
func TestPublishedWorkingSet(t *testing.T) {
	var checkpoint string
	for name, c := range map[string]struct {
		sets  func() [][]byte
		spoil func(*v1.Manifest)
		want  string
	}{
		"newest": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 0), encode(t, checkpoint, false, 1, 2)}
		}, nil, "12"},
		"newest is of another checkpoint": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 0), encode(t, digest.FromString("x").String(), false, 1)}
		}, nil, "0"},
		"newest is damaged": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 0), []byte("damaged")}
		}, nil, "0"},
		"chunks that are not there": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 9, 1)}
		}, nil, "1"},
		"other artifact": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 1)}
		}, func(m *v1.Manifest) { m.ArtifactType = "application/vnd.example" }, ""},
		"no layer": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 1)}
		}, func(m *v1.Manifest) { m.Layers = nil }, ""},
		"layer too large": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 1)}
		}, func(m *v1.Manifest) { m.Layers[0].Size = 1 << 40 }, ""},
		"layer with another digest": {func() [][]byte {
			return [][]byte{encode(t, checkpoint, false, 1)}
		}, func(m *v1.Manifest) { m.Layers[0].Digest = digest.FromString("y") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			s := newSample(t)
			n.push(s)
			resp, err := n.prepare("before", nil)
			if err != nil {
				t.Fatal(err)
			}
			checkpoint = resp.Digest
			n.manager.wg.Wait()
			clear(n.manager.lookups) // as after a while
			n.refer(s.indexDesc.Digest, c.spoil, c.sets()...)
			if resp, err = n.prepare("c", nil); err != nil {
				t.Fatal(err)
			}
			if got := n.present(resp.RestoreId); got != c.want {
				t.Errorf("chunks %q are there instead of %q", got, c.want)
			}
			if _, err := n.manager.WorkingSet(t.Context(), resp.Digest); (err == nil) != (c.want != "") {
				t.Errorf("kept on the node: %v", err)
			}
			if _, err := n.manager.Expected(t.Context(), resp.RestoreId); (err == nil) != (c.want != "") {
				t.Errorf("expected: %v", err)
			}
		})
	}
}

// TestPartialWorkingSet: a recording that was cut short does not hide what was published, and is not forgotten without that.
func TestPartialWorkingSet(t *testing.T) {
	n := newNode(t)
	s := newSample(t)
	n.push(s)
	resp, err := n.prepare("c", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.manager.Record(t.Context(), resp.RestoreId, encode(t, resp.Digest, true, 1)); err != nil {
		t.Fatal(err)
	}
	n.forget(resp.RestoreId)
	if resp, err = n.prepare("c", nil); err != nil {
		t.Fatal(err)
	}
	if got := n.present(resp.RestoreId); got != "1" {
		t.Errorf("chunks %q are there", got)
	}
	n.forget(resp.RestoreId)
	n.refer(s.indexDesc.Digest, nil, encode(t, resp.Digest, false, 0))
	if resp, err = n.prepare("c", nil); err != nil {
		t.Fatal(err)
	}
	if got := n.present(resp.RestoreId); got != "01" {
		t.Errorf("chunks %q are there", got)
	}
	if p, err := n.manager.WorkingSet(t.Context(), resp.Digest); err != nil || string(p) != string(encode(t, resp.Digest, false, 0)) {
		t.Errorf("%x, %v", p, err)
	}
}

// TestReferrersHang: a registry that does not answer about working sets delays nothing.
func TestReferrersHang(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	inner := n.registry
	var once sync.Once
	asked, gone := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(gone) }) // before the server ends
	n.answer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/referrers/") {
			once.Do(func() { close(asked) })
			<-gone // whatever the client does
		}
		inner.ServeHTTP(w, r)
	}))
	resp, err := n.prepare("c", nil)
	if err != nil {
		t.Fatal(err)
	}
	<-asked
	if err := n.manager.Fetch(t.Context(), &api.FetchRequest{RestoreId: resp.RestoreId, Chunks: []uint32{1}, Urgency: api.Urgency_DEMAND}); err != nil {
		t.Fatal(err)
	}
}
