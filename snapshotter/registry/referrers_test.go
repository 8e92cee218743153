// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

func TestReferrers(t *testing.T) {
	subject := digest.FromString("subject")
	const kind, other = "application/vnd.example.a", "application/vnd.example.b"
	index := func(types ...string) []byte {
		x := v1.Index{MediaType: v1.MediaTypeImageIndex}
		for _, a := range types {
			x.Manifests = append(x.Manifests, v1.Descriptor{MediaType: v1.MediaTypeImageManifest, ArtifactType: a, Digest: digest.FromString(a), Size: 7})
		}
		p, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	api := "/v2/" + repoName + "/referrers/" + subject.String()
	tag := "/v2/" + repoName + "/manifests/" + strings.Replace(subject.String(), ":", "-", 1)
	for name, c := range map[string]struct {
		status  map[string]int // 404 for what is not named
		body    map[string][]byte
		want    int
		refused func(error) bool
	}{
		"api":              {map[string]int{api: 200}, map[string][]byte{api: index(other, kind)}, 1, nil},
		"api knows none":   {map[string]int{api: 200, tag: 200}, map[string][]byte{api: index(), tag: index(kind)}, 0, nil},
		"tag":              {map[string]int{tag: 200}, map[string][]byte{tag: index(kind, other)}, 1, nil},
		"tag, odd answer":  {map[string]int{api: 400, tag: 200}, map[string][]byte{tag: index(kind)}, 1, nil},
		"neither":          {nil, nil, 0, nil},
		"no index":         {map[string]int{api: 200}, map[string][]byte{api: []byte("<html>")}, 0, errdefs.IsDataLoss},
		"too long":         {map[string]int{api: 200}, map[string][]byte{api: bytes.Repeat([]byte(" "), maxReferrers+1)}, 0, errdefs.IsDataLoss},
		"digest of no use": {map[string]int{api: 200}, map[string][]byte{api: []byte(`{"manifests":[{"artifactType":"` + kind + `","digest":"../x"}]}`)}, 0, nil},
		"down":             {map[string]int{api: 503}, nil, 0, errdefs.IsUnavailable},
		"forbidden":        {map[string]int{api: 403}, nil, 0, errdefs.IsPermissionDenied},
	} {
		var asked []string
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked = append(asked, r.URL.Path)
			if r.URL.Path == api && r.URL.Query().Get("artifactType") != kind {
				t.Errorf("%s: asked with the query %q", name, r.URL.RawQuery)
			}
			code, ok := c.status[r.URL.Path]
			if !ok {
				code = http.StatusNotFound
			}
			w.WriteHeader(code)
			_, _ = w.Write(c.body[r.URL.Path])
		}))
		list, err := open(t, plainHosts(t), address(srv)).Referrers(t.Context(), subject, kind)
		srv.Close()
		if c.refused == nil && err != nil || c.refused != nil && (err == nil || !c.refused(err)) {
			t.Errorf("%s: %v", name, err)
		}
		if len(list) != c.want || len(list) > 0 && (list[0].ArtifactType != kind || list[0].Size != 7) {
			t.Errorf("%s: %+v", name, list)
		}
		if len(asked) > 2 {
			t.Errorf("%s: asked for %q", name, asked)
		}
	}
}
