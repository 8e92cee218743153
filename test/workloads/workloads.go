// SPDX-License-Identifier: Apache-2.0

// Package workloads has the programs that are checkpointed and restored in tests, demo and benchmarks, as ordinary OCI images.
// Each holds state in memory from which a caller can tell whether it came back; the programs' own comments say how.
//
// Build compiles them and makes the Debian root filesystem that most of them share (it needs the network, once); Push writes
// images to a registry, in which the shared layer is uploaded once and mounted into the other repositories.
package workloads

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

//go:embed agent/agent.py node/server.js nginx/nginx.conf pipeline/pipeline.sh debian/rootfs.sh
var sources embed.FS

// Names of the images, all with the tag 1.
const (
	Pause     = "pause"     // the pod sandbox
	Synthetic = "synthetic" // :8080/touch, /verify; MEMORY_MIB
	Threads   = "threads"   // :8080/state
	Debian    = "debian"    // the root filesystem alone
	Agent     = "agent"     // Python, :8080/ask?q=, /checksum; DOCUMENTS
	Node      = "node"      // Node.js, :8080/ask?key=, /checksum
	Redis     = "redis"     // :6379, empty; redis-cli is in the image
	Nginx     = "nginx"     // :8080/, two workers that run as www-data
	Pipeline  = "pipeline"  // a shell's process tree; answers in its log
	Sockets   = "sockets"   // socket pair and deleted file; answers in its log
	Crowd     = "crowd"     // test/torture's; many threads or processes that want the same memory
	Torture   = "torture"   // test/torture's; random things done to memory
	Bare      = "bare"      // two processes without a lazy page
)

// Tag is the tag of all images.
const Tag = "1"

// image says what an image consists of.
type image struct {
	debian  bool              // on the Debian root filesystem, else on nothing
	sources map[string]string // path in the image → embedded file
	program string            // name of a compiled program, put into /usr/local/bin
	command []string          // entrypoint
	env     []string
}

var images = map[string]image{
	Pause:     {program: "pause", command: []string{"/usr/local/bin/pause"}},
	Synthetic: {program: "synthetic", command: []string{"/usr/local/bin/synthetic"}},
	Threads:   {program: "threads", command: []string{"/usr/local/bin/threads"}},
	Debian:    {debian: true, command: []string{"/bin/sh"}},
	Agent: {
		debian: true, sources: map[string]string{"app/agent.py": "agent/agent.py"},
		command: []string{"/usr/bin/python3", "/app/agent.py"}, env: []string{"PYTHONDONTWRITEBYTECODE=1"},
	},
	Node: {
		debian: true, sources: map[string]string{"app/server.js": "node/server.js"},
		command: []string{"/usr/bin/node", "/app/server.js"},
	},
	Redis: {
		debian:  true,
		command: []string{"/usr/bin/redis-server", "--save", "", "--appendonly", "no", "--protected-mode", "no", "--bind", "0.0.0.0"},
	},
	Nginx: {
		debian: true, sources: map[string]string{"app/nginx.conf": "nginx/nginx.conf"},
		command: []string{"/usr/sbin/nginx", "-c", "/app/nginx.conf"},
	},
	Pipeline: {
		debian: true, sources: map[string]string{"app/pipeline.sh": "pipeline/pipeline.sh"},
		command: []string{"/bin/sh", "/app/pipeline.sh"},
	},
	Sockets: {debian: true, program: "sockets", command: []string{"/usr/local/bin/sockets"}},
	Crowd:   {program: "crowd", command: []string{"/usr/local/bin/crowd"}},
	Torture: {program: "torture", command: []string{"/usr/local/bin/torture"}},
	Bare:    {program: "bare", command: []string{"/usr/local/bin/bare"}},
}

// All lists the names of all images.
func All() []string { return slices.Sorted(maps.Keys(images)) }

// Build makes below root/build what Push needs, as far as it is not there. Steps are printed to progress.
func Build(ctx context.Context, root string, progress io.Writer) error {
	programs := programDir(root)
	if err := os.MkdirAll(programs, 0o755); err != nil {
		return err
	}
	fmt.Fprintln(progress, "==> workloads: programs")
	here := filepath.Join(root, "test", "workloads")
	for _, n := range []string{"pause", "synthetic", "threads"} {
		if err := run(ctx, progress, here, []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(programs, n), "./"+n); err != nil {
			return err
		}
	}
	// Static, so that it does not matter whether the image's libc is the one that this machine compiles for.
	for n, source := range map[string]string{"sockets": "sockets/main.c", "crowd": "../torture/program/crowd.c", "torture": "../torture/program/torture.c"} {
		if err := run(ctx, progress, here, nil, "gcc", "-O2", "-Wall", "-Wextra", "-static", "-pthread", "-o", filepath.Join(programs, n), source); err != nil {
			return err
		}
	}
	// x86-64 as all of it so far.
	if err := run(ctx, progress, here, nil, "gcc", "-O2", "-Wall", "-Wextra", "-static", "-nostdlib", "-fno-asynchronous-unwind-tables", "-o", filepath.Join(programs, "bare"), "bare/main.c"); err != nil {
		return err
	}
	return buildDebian(ctx, root, progress)
}

// buildDebian makes the root filesystem and keeps it as an OCI layout, so that it is compressed only once.
func buildDebian(ctx context.Context, root string, progress io.Writer) error {
	dir := debianDir(root)
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	archive := dir + ".tar"
	if err := run(ctx, progress, root, nil, filepath.Join(root, "test", "workloads", "debian", "rootfs.sh"), archive); err != nil {
		return err
	}
	fmt.Fprintln(progress, "==> Debian root filesystem: compressing")
	layer, err := tarball.LayerFromFile(archive, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return err
	}
	base, err := compose(empty.Image, []v1.Layer{layer}, images[Debian])
	if err != nil {
		return err
	}
	made := dir + ".new"
	if err := os.RemoveAll(made); err != nil {
		return err
	}
	path, err := layout.Write(made, empty.Index)
	if err != nil {
		return err
	}
	if err := path.AppendImage(base); err != nil {
		return err
	}
	if err := os.Rename(made, dir); err != nil {
		return err
	}
	return os.Remove(archive)
}

func programDir(root string) string { return filepath.Join(root, "build", "workloads") }

// debianDir is the layout's folder, named by what it is made from.
func debianDir(root string) string {
	script, err := sources.ReadFile("debian/rootfs.sh")
	if err != nil {
		panic(err) // embedded
	}
	sum := sha256.Sum256(script)
	return filepath.Join(root, "build", "cache", "debian-"+hex.EncodeToString(sum[:6]))
}

func run(ctx context.Context, out io.Writer, dir string, env []string, command string, args ...string) error {
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(command), err)
	}
	return nil
}

// Push writes the named images to the registry (host:port, plain HTTP) as NAME:1.
func Push(ctx context.Context, root, registry string, names ...string) error {
	for _, n := range names {
		if err := push(ctx, root, registry, n); err != nil {
			return fmt.Errorf("push %s: %w", n, err)
		}
	}
	return nil
}

func push(ctx context.Context, root, registry, n string) error {
	spec, ok := images[n]
	if !ok {
		return errors.New("no such workload")
	}
	to, err := name.ParseReference(registry+"/"+n+":"+Tag, name.Insecure)
	if err != nil {
		return err
	}
	if n == Debian {
		_, err := ensureDebian(ctx, root, registry)
		return err
	}
	base := empty.Image
	if spec.debian {
		// From the registry rather than from the disk, because only such layers are mounted across repositories.
		if base, err = ensureDebian(ctx, root, registry); err != nil {
			return err
		}
	}
	layer, err := appLayer(root, spec)
	if err != nil {
		return err
	}
	made, err := compose(base, []v1.Layer{layer}, spec)
	if err != nil {
		return err
	}
	return remote.Write(to, made, remote.WithContext(ctx))
}

// ensureDebian gives the shared base image in the registry, to which it is written if it is not there.
func ensureDebian(ctx context.Context, root, registry string) (v1.Image, error) {
	ref, err := name.ParseReference(registry+"/"+Debian+":"+Tag, name.Insecure)
	if err != nil {
		return nil, err
	}
	if found, err := remote.Image(ref, remote.WithContext(ctx)); err == nil {
		return found, nil
	}
	index, err := layout.ImageIndexFromPath(debianDir(root))
	if err != nil {
		return nil, fmt.Errorf("%w: run make images", err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	if len(manifest.Manifests) != 1 {
		return nil, fmt.Errorf("%s has %d images instead of one: remove it and run make images", debianDir(root), len(manifest.Manifests))
	}
	local, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		return nil, err
	}
	if err := remote.Write(ref, local, remote.WithContext(ctx)); err != nil {
		return nil, err
	}
	return remote.Image(ref, remote.WithContext(ctx))
}

// appLayer packs what an image has of its own. The same content gives the same bytes.
func appLayer(root string, spec image) (v1.Layer, error) {
	var buf bytes.Buffer
	archive := tar.NewWriter(&buf)
	// nginx and others expect it, also where there is no Debian below.
	if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777, ModTime: time.Unix(0, 0)}); err != nil {
		return nil, err
	}
	add := func(to string, mode int64, content []byte) error {
		err := archive.WriteHeader(&tar.Header{Name: to, Mode: mode, Size: int64(len(content)), ModTime: time.Unix(0, 0)})
		if err == nil {
			_, err = archive.Write(content)
		}
		return err
	}
	if spec.program != "" {
		content, err := os.ReadFile(filepath.Join(programDir(root), spec.program))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: run make images", err)
		}
		if err != nil {
			return nil, err
		}
		if err := add("usr/local/bin/"+spec.program, 0o755, content); err != nil {
			return nil, err
		}
	}
	for _, to := range slices.Sorted(maps.Keys(spec.sources)) {
		content, err := sources.ReadFile(spec.sources[to])
		if err != nil {
			return nil, err
		}
		if err := add(path.Clean(to), 0o755, content); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

// compose puts layers on a base and gives the result spec's configuration.
func compose(base v1.Image, layers []v1.Layer, spec image) (v1.Image, error) {
	base = mutate.ConfigMediaType(mutate.MediaType(base, types.OCIManifestSchema1), types.OCIConfigJSON)
	made, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		return nil, err
	}
	file, err := made.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.Architecture, file.OS = runtime.GOARCH, "linux"
	file.Config.Entrypoint, file.Config.Cmd = spec.command, nil
	file.Config.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, spec.env...)
	file.Config.WorkingDir = "/"
	return mutate.ConfigFile(made, file)
}
