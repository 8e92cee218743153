// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/imageverifier"
	"github.com/containerd/containerd/v2/pkg/imageverifier/bindir"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// maxVerdicts bounds how many verdicts are remembered.
const maxVerdicts = 1024

// verifiers asks the programs in a folder about images.
type verifiers struct {
	dir      string
	judge    imageverifier.ImageVerifier
	lifetime time.Duration
	now      func() time.Time

	mu       sync.Mutex
	verdicts map[question]*verdict
}

func newVerifiers(dir string, lifetime time.Duration) *verifiers {
	return &verifiers{
		dir: dir,
		judge: bindir.NewImageVerifier(&bindir.Config{
			BinDir:             dir,
			MaxVerifiers:       -1,             // none is left out
			PerVerifierTimeout: 10_000_000_000, // ns, containerd's default; the type is internal there
		}),
		lifetime: lifetime, now: time.Now, verdicts: make(map[question]*verdict),
	}
}

// question is what a verdict is about. Verifiers may judge by the name, too.
type question struct {
	name      string
	index     digest.Digest
	verifiers string // which programs were asked
}

// verdict is an answer, or one that is waited for.
type verdict struct {
	done   chan struct{} // closed when the rest is valid
	err    error
	gaveUp bool // whoever asked did not wait for the answer
	until  time.Time
}

func (v *verifiers) verify(ctx context.Context, name string, index v1.Descriptor) error {
	programs, err := v.programs()
	if err != nil {
		return refused(name, index.Digest, "%w", err)
	}
	q := question{name, index.Digest, programs}
	for {
		answer, mine := v.claim(q)
		if mine {
			begin := v.now()
			err := v.ask(ctx, name, index, programs)
			v.settle(q, answer, err, ctx.Err() != nil, begin.Add(v.lifetime))
			return err
		}
		select {
		case <-answer.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		if !answer.gaveUp {
			return answer.err
		}
	}
}

// claim returns the verdict on a question, or a new one that the caller must settle.
func (v *verifiers) claim(q question) (_ *verdict, mine bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if a, ok := v.verdicts[q]; ok && (a.until.IsZero() || v.now().Before(a.until)) {
		return a, false
	}
	if len(v.verdicts) >= maxVerdicts {
		clear(v.verdicts) // those that somebody waits for are settled all the same
	}
	a := &verdict{done: make(chan struct{})}
	v.verdicts[q] = a
	return a, true
}

// settle makes a verdict known. A refusal is not remembered: who signs an image need not wait.
func (v *verifiers) settle(q question, a *verdict, err error, gaveUp bool, until time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	a.err, a.gaveUp, a.until = err, gaveUp, until
	if err != nil && v.verdicts[q] == a {
		delete(v.verdicts, q)
	}
	close(a.done)
}

func (v *verifiers) ask(ctx context.Context, name string, index v1.Descriptor, programs string) error {
	answer, err := v.judge.VerifyImage(ctx, name, index)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return refused(name, index.Digest, "no verdict from the verifiers in %s (trust.verifiers_dir in thaw's configuration): %.500q: see the daemon's log at level debug: %w", v.dir, err.Error(), errdefs.ErrUnavailable)
	}
	if !answer.OK {
		return refused(name, index.Digest, "trust.verifiers_dir in thaw's configuration: %.500q: sign the image so that it is accepted, or take one that is: %w", answer.Reason, errdefs.ErrPermissionDenied)
	}
	// An empty folder accepts everything. It may have become that since.
	after, err := v.programs()
	if err == nil && after != programs {
		err = fmt.Errorf("the verifiers in %s were changed meanwhile: try again: %w", v.dir, errdefs.ErrUnavailable)
	}
	if err != nil {
		return refused(name, index.Digest, "%w", err)
	}
	log.G(ctx).WithField("image", name).WithField("digest", index.Digest).Debugf("verified: %.500q", answer.Reason)
	return nil
}

// programs identifies the verifiers by what is changed with them. There must be
// some, and only root and the daemon's user may be able to change them.
func (v *verifiers) programs() (string, error) {
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return "", fmt.Errorf("trust.verifiers_dir in thaw's configuration (correct it, or make the folder): %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if len(entries) == 0 {
		return "", fmt.Errorf("trust.verifiers_dir in thaw's configuration: %s has no verifier: put one there: %w", v.dir, errdefs.ErrFailedPrecondition)
	}
	var all strings.Builder
	for i := range len(entries) + 1 {
		path := v.dir
		if i > 0 {
			path = filepath.Join(v.dir, entries[i-1].Name())
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return "", fmt.Errorf("trust.verifiers_dir in thaw's configuration: %w: %w", &os.PathError{Op: "stat", Path: path, Err: err}, errdefs.ErrFailedPrecondition)
		}
		if st.Mode&0o022 != 0 || st.Uid != 0 && int(st.Uid) != os.Geteuid() {
			return "", fmt.Errorf("trust.verifiers_dir in thaw's configuration: others than root may change %s: chown root and chmod go-w it: %w", path, errdefs.ErrFailedPrecondition)
		}
		fmt.Fprintf(&all, "%q %d %d %d %d.%d %d.%d\n", path, st.Dev, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec)
	}
	return all.String(), nil
}
