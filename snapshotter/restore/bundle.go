// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/config"
)

const (
	// AnnotationRestore on a container or pod says what to do with its image's
	// checkpoint. "required" refuses to start the container without one.
	AnnotationRestore = checkpoint.Prefix + "restore"
	// AnnotationPolicy overrides the node's policy.
	AnnotationPolicy = checkpoint.Prefix + "policy"
	// AnnotationWorkingSet on a container or pod says what to do about its working
	// set. "record" records it anew: nothing is done ahead of the container's touches.
	AnnotationWorkingSet = checkpoint.Prefix + "working-set"

	restoreRequired  = "required"
	workingSetRecord = "record"

	// maxSpecSize bounds a bundle's config.json in bytes.
	maxSpecSize = 16 << 20
)

// Annotations that CRI puts into a container's spec
// (containerd internal/cri/annotations).
const (
	criContainerType    = "io.kubernetes.cri.container-type"
	criSandbox          = "sandbox"
	criImageName        = "io.kubernetes.cri.image-name"
	criSandboxName      = "io.kubernetes.cri.sandbox-name"
	criSandboxNamespace = "io.kubernetes.cri.sandbox-namespace"
)

// readSpec reads the OCI spec of a bundle.
func readSpec(bundle string) (*specs.Spec, error) {
	path := filepath.Join(bundle, "config.json")
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("container's spec: %w", err)
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxSpecSize+1))
	if err != nil {
		return nil, fmt.Errorf("container's spec: %w", err)
	}
	if len(p) > maxSpecSize {
		return nil, fmt.Errorf("container's spec %s is over the limit of %d bytes: %w", path, maxSpecSize, errdefs.ErrInvalidArgument)
	}
	var spec specs.Spec
	if err := json.Unmarshal(p, &spec); err != nil {
		return nil, fmt.Errorf("container's spec %s: %w: %w", path, err, errdefs.ErrInvalidArgument)
	}
	return &spec, nil
}

// wish is what a container's spec says about its restore.
type wish struct {
	sandbox  bool
	image    string        // as containerd's image store names it; empty: see the container's record
	target   v1.Descriptor // what the image name stands for
	required bool
	policy   string
	record   bool // its working set, as if nothing were known of it
	pod      string
}

func wishOf(spec *specs.Spec, policy string) (wish, error) {
	a := spec.Annotations
	w := wish{
		sandbox: a[criContainerType] == criSandbox,
		image:   storeName(a[criImageName]),
		policy:  policy,
	}
	if w.sandbox {
		return w, nil
	}
	if ns, name := a[criSandboxNamespace], a[criSandboxName]; name != "" {
		w.pod = ns + "/" + name
	}
	switch v := a[AnnotationRestore]; v {
	case "":
	case restoreRequired:
		w.required = true
	default:
		return w, fmt.Errorf("annotation %s is %.40q: the only value it may have is %q: %w", AnnotationRestore, v, restoreRequired, errdefs.ErrInvalidArgument)
	}
	switch v := a[AnnotationWorkingSet]; v {
	case "":
	case workingSetRecord:
		w.record = true
	default:
		return w, fmt.Errorf("annotation %s is %.40q: the only value it may have is %q: %w", AnnotationWorkingSet, v, workingSetRecord, errdefs.ErrInvalidArgument)
	}
	if v := a[AnnotationPolicy]; v != "" {
		if !slices.Contains(config.Policies(), v) {
			return w, fmt.Errorf("annotation %s is %.40q: use one of %s: %w", AnnotationPolicy, v, strings.Join(config.Policies(), ", "), errdefs.ErrInvalidArgument)
		}
		w.policy = v
	}
	return w, nil
}

// storeName is the name under which CRI keeps the image that a pod names: whole, and without
// the tag if there is a digest. Image IDs stay as they are.
func storeName(image string) string {
	if digest.Digest(image).Validate() == nil {
		return image
	}
	named, err := reference.ParseDockerRef(image)
	if err != nil {
		return image
	}
	return named.String()
}

// checkPIDNamespace refuses containers that share a PID namespace: the processes
// must get the PIDs that they had, and there somebody else may have them.
func checkPIDNamespace(spec *specs.Spec) error {
	if spec.Linux != nil {
		for _, ns := range spec.Linux.Namespaces {
			if ns.Type == specs.PIDNamespace && ns.Path == "" {
				return nil
			}
		}
	}
	return fmt.Errorf("the container shares its PID namespace, where the PIDs of the checkpoint may be taken (give the pod neither shareProcessNamespace nor hostPID): %w", errdefs.ErrFailedPrecondition)
}
