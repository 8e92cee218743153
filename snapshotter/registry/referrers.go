// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxReferrers bounds a list of referrers, in bytes: as large as an index.
const maxReferrers = 4 << 20

// Referrers returns the descriptors of the manifests of one artifact type whose
// subject is a manifest in the repository (OCI distribution specification 1.1,
// "Listing Referrers"). Registries that lack the referrers API are asked for the
// index that clients keep under a tag for them. The first host that knows any
// answers; none is no error. Nothing is tried twice: who asks does so in passing.
//
// The list is the registry's word. What a descriptor names is verified when it is
// read with Manifest.
func (r *Repository) Referrers(ctx context.Context, subject digest.Digest, artifactType string) ([]v1.Descriptor, error) {
	set, err := r.pullHosts()
	if err != nil {
		return nil, err
	}
	ctx, err = docker.ContextWithRepositoryScope(ctx, r.ref, false)
	if err != nil {
		return nil, err
	}
	var errs []*Error
	for _, host := range set.hosts {
		list, lerr := r.referrers(ctx, host, subject, artifactType)
		if len(list) > 0 {
			return list, nil
		}
		if lerr != nil {
			errs = append(errs, lerr)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	if len(errs) > 0 {
		return nil, failure("referrers of "+describe("manifests", subject), errs)
	}
	return nil, nil
}

func (r *Repository) referrers(ctx context.Context, host *host, subject digest.Digest, artifactType string) ([]v1.Descriptor, *Error) {
	list, err := r.list(ctx, host, "referrers", subject.String(), url.Values{"artifactType": {artifactType}})
	if err != nil && (errdefs.IsNotFound(err) || err.Status == http.StatusBadRequest || err.Status == http.StatusMethodNotAllowed) {
		// The tag schema: the digest with a dash for the colon.
		list, err = r.list(ctx, host, "manifests", strings.Replace(subject.String(), ":", "-", 1), nil)
		if err != nil && errdefs.IsNotFound(err) {
			return nil, nil
		}
	}
	if err != nil {
		return nil, err
	}
	var out []v1.Descriptor
	for _, d := range list.Manifests {
		if d.ArtifactType == artifactType && d.Digest.Validate() == nil { // not all registries filter
			out = append(out, d)
		}
	}
	return out, nil
}

// list reads an index that is not known by its digest.
func (r *Repository) list(ctx context.Context, host *host, kind, name string, query url.Values) (*v1.Index, *Error) {
	// The name stands where others have a digest; there is no other difference.
	rd := &Reader{repo: r, kind: kind, rg: Range{Digest: digest.Digest(name)}, query: query, ctx: ctx}
	resp, err := rd.ask(ctx, host)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	p, rerr := io.ReadAll(io.LimitReader(resp.Body, maxReferrers+1))
	r.count(0, int64(len(p)))
	if rerr != nil {
		return nil, transportError(host.Host, rerr)
	}
	if len(p) > maxReferrers {
		return nil, wrong(host.Host, "a list of referrers of more than %d bytes", maxReferrers)
	}
	var list v1.Index
	if json.Unmarshal(p, &list) != nil {
		return nil, wrong(host.Host, "a list of referrers that is no index")
	}
	return &list, nil
}
