// SPDX-License-Identifier: Apache-2.0

// Package archive reads the archives that the kubelet's checkpoint API, crictl
// checkpoint and Podman write of a container: a tar file, plain or compressed,
// with CRIU's images in checkpoint/, the spec, what the container was, and the
// changes in its root filesystem.
//
// Archives are treated as hostile: only regular files of the expected names are
// taken, nothing is followed, and nothing is written outside of one temporary
// folder.
package archive

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/publish"
)

// ErrFormat is wrapped by errors about an archive's content.
var ErrFormat = errors.New("invalid checkpoint archive")

// Options say how an archive is read.
type Options struct {
	// TempDir is where the archive is unpacked; empty means os.TempDir.
	TempDir string
	// MaxSize bounds in bytes what the archive may unpack to; 0 means 1 TiB.
	MaxSize int64
	// Base names the base image in place of the one that the archive names.
	Base string
	// CertsDir is containerd's registry configuration folder.
	CertsDir string
}

// Archive is an unpacked archive. Close removes it.
type Archive struct {
	// Source is what to publish. It is valid until Close.
	Source *publish.Source

	dir string
}

// Names in an archive (containerd, internal/cri/server, and checkpointctl).
const (
	configDump  = "config.dump"
	specDump    = "spec.dump"
	rootfsDiff  = "rootfs-diff.tar"
	deletedList = "deleted.files"
	dumpLog     = "dump.log"
	imagesDir   = "checkpoint"
)

// Open unpacks an archive and looks its base image up in the registry.
func Open(ctx context.Context, name string, opts Options) (_ *Archive, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	a := &Archive{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("archive %s: %w", name, err), a.Close())
		}
	}()
	if a.dir, err = os.MkdirTemp(opts.TempDir, "thaw-archive-"); err != nil {
		return nil, err
	}
	if err := unpack(ctx, f, a.dir, opts.MaxSize); err != nil {
		return nil, err
	}
	a.Source = &publish.Source{}
	if err := a.read(); err != nil {
		return nil, err
	}
	return a, a.base(ctx, opts)
}

// Close removes the unpacked archive.
func (a *Archive) Close() error {
	var err error
	if a.Source != nil && a.Source.Images != nil {
		err = a.Source.Images.Close()
	}
	if a.dir != "" {
		err = errors.Join(err, os.RemoveAll(a.dir))
	}
	return err
}

// containerConfig is config.dump.
type containerConfig struct {
	ID              string    `json:"id"`
	Name            string    `json:"name"`
	RootfsImage     string    `json:"rootfsImage"`
	RootfsImageRef  string    `json:"rootfsImageRef"`
	RootfsImageName string    `json:"rootfsImageName"`
	Runtime         string    `json:"runtime"`
	CheckpointedAt  time.Time `json:"checkpointedTime"`
}

// read makes the source of what was unpacked.
func (a *Archive) read() (err error) {
	src := a.Source
	if src.Images, err = image.Open(filepath.Join(a.dir, imagesDir)); err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if _, err := src.Images.Inventory(); err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if src.Spec, err = a.file(specDump); err != nil {
		return err
	}
	var c containerConfig
	p, err := a.file(configDump)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(p, &c); err != nil {
		return fmt.Errorf("%w: %s: %.200v", ErrFormat, configDump, err)
	}
	if p, err = a.file(deletedList); err == nil {
		if err := json.Unmarshal(p, &src.Deleted); err != nil {
			return fmt.Errorf("%w: %s: %.200v", ErrFormat, deletedList, err)
		}
	}
	src.Created = c.CheckpointedAt
	if src.Created.IsZero() {
		src.Created = time.Now()
	}
	src.Container = checkpoint.Container{Name: c.Name, ID: c.ID}
	var spec struct {
		Annotations map[string]string `json:"annotations"`
		Process     struct {
			Terminal bool `json:"terminal"`
		} `json:"process"`
	}
	if err := json.Unmarshal(src.Spec, &spec); err != nil {
		return fmt.Errorf("%w: %s: %.200v", ErrFormat, specDump, err)
	}
	src.Container.Terminal = spec.Process.Terminal
	// CRI's own name of a container is made of the pod's and the attempt too.
	if n := spec.Annotations["io.kubernetes.cri.container-name"]; n != "" {
		src.Container.Name = n
	}
	src.Host.Runtime = c.Runtime
	src.Host.CRIU = a.criuVersion()
	// The archive says nothing else of the processor.
	if src.Host.CPUFeatures, err = src.Images.CPUFeatures(); err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	src.Base = &publish.Base{Reference: baseReference(c)}
	diff := filepath.Join(a.dir, rootfsDiff)
	if _, err := os.Stat(diff); err == nil {
		src.Rootfs = func(context.Context) (io.ReadCloser, error) { return os.Open(diff) }
	} else if len(src.Deleted) > 0 {
		src.Rootfs = func(context.Context) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("")), nil }
	}
	return nil
}

// maxJSON bounds in bytes each of the archive's JSON files.
const maxJSON = 16 << 20

func (a *Archive) file(name string) ([]byte, error) {
	f, err := os.Open(filepath.Join(a.dir, name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: it has no %s: give it what the kubelet's checkpoint API or crictl checkpoint wrote", ErrFormat, name)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxJSON+1))
	if err == nil && len(p) > maxJSON {
		err = fmt.Errorf("%w: %s is larger than %d bytes", ErrFormat, name, maxJSON)
	}
	return p, err
}

// criuVersion is what dump.log says, if the archive has one.
func (a *Archive) criuVersion() string {
	f, err := os.Open(filepath.Join(a.dir, dumpLog))
	if err != nil {
		return ""
	}
	defer f.Close()
	s := bufio.NewScanner(io.LimitReader(f, 64<<10))
	for s.Scan() {
		if _, v, ok := strings.Cut(s.Text(), " Version: "); ok {
			v, _, _ = strings.Cut(v, " ")
			return v
		}
	}
	return ""
}

// baseReference chooses among the names of the base image: one with a digest
// still means the same image.
func baseReference(c containerConfig) string {
	for _, r := range []string{c.RootfsImageRef, c.RootfsImageName, c.RootfsImage} {
		if strings.Contains(r, "@sha256:") {
			return r
		}
	}
	for _, r := range []string{c.RootfsImageName, c.RootfsImage, c.RootfsImageRef} {
		if r != "" && !strings.HasPrefix(r, "sha256:") {
			return r
		}
	}
	return ""
}

// architectures are CRIU's names of Go's.
var architectures = map[string]string{"X86_64": "amd64", "AARCH64": "arm64", "S390": "s390x", "PPC64": "ppc64le", "LOONGARCH64": "loong64", "RISCV64": "riscv64"}

// base looks up the base image.
func (a *Archive) base(ctx context.Context, opts Options) error {
	src := a.Source
	tasks, err := src.Images.Tasks()
	if err != nil {
		return err
	}
	for _, t := range tasks {
		if arch, ok := architectures[t.Architecture]; ok {
			src.Host.Architecture = arch
			break
		}
	}
	if src.Host.Architecture == "" {
		return fmt.Errorf("%w: no process has a known architecture", ErrFormat)
	}
	ref := opts.Base
	if ref == "" {
		ref = src.Base.Reference
	}
	if ref == "" {
		return errors.New("it names no base image that is in a registry: name one with --base")
	}
	src.Base, err = publish.BaseFromRegistry(ctx, ref, opts.CertsDir, v1.Platform{OS: "linux", Architecture: src.Host.Architecture})
	if err != nil {
		return fmt.Errorf("%w: name another with --base", err)
	}
	return nil
}
