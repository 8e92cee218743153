// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	continuity "github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// rootfsChanges puts what a container changed in its root filesystem into
// containerd's content store, as an uncompressed layer: compressing is done while
// uploading, when the container runs again.
//
// containerd's own differ compares all files of the image with all files of the
// container, which takes seconds for a large image, and the container is frozen
// meanwhile. Where the root filesystem is an ordinary overlay, the changes are
// what is in its upper directory.
func rootfsChanges(ctx context.Context, client *containerd.Client, c *Container) (v1.Descriptor, error) {
	sn := client.SnapshotService(c.info.Snapshotter)
	mounts, err := sn.Mounts(ctx, c.info.SnapshotKey)
	if err != nil {
		return v1.Descriptor{}, err
	}
	ref := "thaw-checkpoint-" + c.info.ID
	if upper, ok := upperDir(mounts); ok {
		desc, err := storeUpper(ctx, client.ContentStore(), ref, upper)
		if !errors.Is(err, errNotPlain) {
			return desc, err
		}
	}
	return rootfs.CreateDiff(ctx, c.info.SnapshotKey, sn, client.DiffService(), diff.WithMediaType(v1.MediaTypeImageLayer), diff.WithReference(ref))
}

// errNotPlain means that an upper directory does not have all that changed, or
// has it in a way that only the kernel understands.
var errNotPlain = errors.New("not a plain upper directory")

// upperDir is the upper directory of a root filesystem that is an overlay
// without options that change what is in it.
func upperDir(mounts []mount.Mount) (string, bool) {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return "", false
	}
	var upper string
	for _, o := range mounts[0].Options {
		key, value, _ := strings.Cut(o, "=")
		switch key {
		case "upperdir":
			upper = value
		case "userxattr", "uidmap", "gidmap":
			return "", false
		case "metacopy", "redirect_dir":
			if value == "on" || value == "follow" {
				return "", false
			}
		}
	}
	if upper == "" {
		return "", false
	}
	_, err := os.Stat(upper) // containerd may have another view of the disk
	return upper, err == nil
}

func storeUpper(ctx context.Context, store content.Ingester, ref, upper string) (_ v1.Descriptor, err error) {
	w, err := content.OpenWriter(ctx, store, content.WithRef(ref))
	if err != nil {
		return v1.Descriptor{}, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	if err := w.Truncate(0); err != nil { // what an earlier attempt left
		return v1.Descriptor{}, err
	}
	buf := bufio.NewWriterSize(w, 1<<20)
	if err := writeUpper(ctx, buf, upper); err != nil {
		return v1.Descriptor{}, err
	}
	if err := buf.Flush(); err != nil {
		return v1.Descriptor{}, err
	}
	st, err := w.Status()
	if err != nil {
		return v1.Descriptor{}, err
	}
	desc := v1.Descriptor{MediaType: v1.MediaTypeImageLayer, Digest: w.Digest(), Size: st.Offset}
	// Without the digest: where it has that content already, from a checkpoint before, containerd's service answers before it gives
	// it to this lease, and it could be collected.
	if err := w.Commit(ctx, desc.Size, ""); err != nil && !errdefs.IsAlreadyExists(err) {
		return v1.Descriptor{}, err
	}
	return desc, nil
}

// opaque, in a path after the name of a directory, makes archive.ChangeWriter
// write the entry .wh..wh..opq (OCI image spec, layer.md, "Opaque Whiteout").
const opaque = ".wh..opq"

// writeUpper writes an overlay's upper directory as an OCI layer
// (Documentation/filesystems/overlayfs.rst).
func writeUpper(ctx context.Context, w io.Writer, upper string) error {
	cw := archive.NewChangeWriter(w, upper)
	err := filepath.WalkDir(upper, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if p == upper {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(p, upper)
		if isWhiteout(info) {
			return cw.HandleChange(continuity.ChangeKindDelete, rel, nil, nil)
		}
		if err := plain(p, info); err != nil {
			return err
		}
		if err := cw.HandleChange(continuity.ChangeKindAdd, rel, info, nil); err != nil {
			return err
		}
		if !info.IsDir() {
			return nil
		}
		switch v, err := xattr(p, "trusted.overlay.opaque"); {
		case err != nil:
			return err
		case v == "y":
			return cw.HandleChange(continuity.ChangeKindDelete, path.Join(rel, opaque), nil, nil)
		case v != "":
			return fmt.Errorf("%w: %s has whiteouts in another form", errNotPlain, rel)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return cw.Close()
}

// isWhiteout reports whether a file stands for one that was deleted: a character
// device with the number 0:0.
func isWhiteout(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode()&fs.ModeCharDevice != 0 && st.Rdev == 0
}

// plain checks that a file has its own content and name.
func plain(p string, info fs.FileInfo) error {
	if !info.IsDir() && !info.Mode().IsRegular() {
		return nil
	}
	for _, name := range []string{"trusted.overlay.metacopy", "trusted.overlay.redirect"} {
		v, err := xattr(p, name)
		if err != nil {
			return err
		}
		if v != "" {
			return fmt.Errorf("%w: %s has %s", errNotPlain, p, name)
		}
	}
	return nil
}

// xattr returns an extended attribute, "" if the file has none of that name. An
// empty attribute is "-".
func xattr(p, name string) (string, error) {
	var buf [4096]byte
	n, err := unix.Lgetxattr(p, name, buf[:])
	switch {
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ENOTSUP):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("%s of %s: %w", name, p, err)
	case n == 0:
		return "-", nil
	}
	return string(buf[:n]), nil
}
