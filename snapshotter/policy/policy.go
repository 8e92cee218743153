// SPDX-License-Identifier: Apache-2.0

// Package policy decides which images a node restores, by rules of its admin: the
// repositories that they may come from, whether they must be named by digest, and
// the image verifiers that must accept them.
//
// Verifiers are programs that speak the protocol of containerd's image verifier
// plugin (io.containerd.image-verifier.v1.bindir), so that the same ones serve both.
// All rules are about the digest that an image name stands for at the time, which
// is the one that is restored.
package policy

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// Options are the rules. The zero value restricts nothing.
type Options struct {
	// Repositories are those that images may come from: HOST/PATH, or HOST/* and
	// HOST/PATH/* for all below. None means all.
	Repositories []string
	// RequireDigest refuses images that are not named by digest.
	RequireDigest bool
	// VerifiersDir has the verifiers, all of which must accept an image. Empty: there are none.
	VerifiersDir string
	// VerdictLifetime is how long an image counts as accepted before the verifiers
	// are asked again.
	VerdictLifetime time.Duration
}

// Policy has the rules of a node. Its methods may be called at the same time; those of a
// nil Policy refuse nothing.
type Policy struct {
	repositories  []pattern
	requireDigest bool
	verifiers     *verifiers
}

// New returns the policy with these rules, nil if they restrict nothing. Its errors
// name the configuration's key.
func New(o Options) (*Policy, error) {
	if len(o.Repositories) == 0 && !o.RequireDigest && o.VerifiersDir == "" {
		return nil, nil
	}
	p := &Policy{requireDigest: o.RequireDigest}
	for _, s := range o.Repositories {
		r, err := parsePattern(s)
		if err != nil {
			return nil, err
		}
		p.repositories = append(p.repositories, r)
	}
	if o.VerifiersDir != "" {
		p.verifiers = newVerifiers(o.VerifiersDir, o.VerdictLifetime)
	}
	return p, nil
}

// pattern allows a repository, or all below it.
type pattern struct {
	name  string
	below bool
}

func parsePattern(s string) (pattern, error) {
	name, below := strings.CutSuffix(s, "/*")
	whole := name
	if below {
		whole += "/x/x" // what may follow; on docker.io one more element would be taken for an image of its library
	}
	named, err := reference.ParseNormalizedNamed(whole)
	if err != nil || !reference.IsNameOnly(named) || named.Name() != whole {
		return pattern{}, fmt.Errorf(`trust.repositories has %.200q: write HOST/PATH, or HOST/* or HOST/PATH/* for all below, without tag or digest, such as "registry.example/agents/*": %w`, s, errdefs.ErrInvalidArgument)
	}
	return pattern{name, below}, nil
}

func (p pattern) allows(name string) bool {
	if p.below {
		return strings.HasPrefix(name, p.name+"/")
	}
	return name == p.name
}

// Admits returns nil unless an image may not be restored because of its name. The digest
// is that of the index which the name stands for.
func (p *Policy) Admits(name string, index digest.Digest) error {
	if p == nil || p.repositories == nil && !p.requireDigest {
		return nil
	}
	named, err := reference.ParseDockerRef(name)
	if err != nil {
		return refused(name, index, "trust in thaw's configuration wants references to a repository: name it HOST/PATH@DIGEST: %w", errdefs.ErrPermissionDenied)
	}
	if p.repositories != nil && !p.allowed(named.Name()) {
		return refused(name, index, "trust.repositories in thaw's configuration does not allow %.200s: take an image of a repository that is allowed, or have the node's admin allow this one: %w", named.Name(), errdefs.ErrPermissionDenied)
	}
	if !p.requireDigest {
		return nil
	}
	d, ok := named.(reference.Digested)
	if !ok {
		return refused(name, index, "trust.require_digest in thaw's configuration wants images named by digest: name it %.200s@%s: %w", named.Name(), index, errdefs.ErrPermissionDenied)
	}
	if d.Digest() != index {
		return refused(name, index, "trust.require_digest in thaw's configuration wants images named by digest, and that name stands for another one in containerd's image store: pull it again: %w", errdefs.ErrPermissionDenied)
	}
	return nil
}

func (p *Policy) allowed(repository string) bool {
	for _, r := range p.repositories {
		if r.allows(repository) {
			return true
		}
	}
	return false
}

// Verify returns nil if all verifiers accept an image: the index that its name stands
// for. It returns early with the context's error.
func (p *Policy) Verify(ctx context.Context, name string, index v1.Descriptor) error {
	if p == nil || p.verifiers == nil {
		return nil
	}
	return p.verifiers.verify(ctx, name, index)
}

// Verifies reports whether there is anything for Verify to do.
func (p *Policy) Verifies() bool { return p != nil && p.verifiers != nil }

func refused(name string, index digest.Digest, format string, args ...any) error {
	return fmt.Errorf("image %.300q (%.80s) may not be restored: %w", name, index, fmt.Errorf(format, args...))
}
