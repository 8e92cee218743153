// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"io"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
)

// Source is a dumped container.
type Source struct {
	// Images are what CRIU and runc wrote.
	Images *image.Dir
	// Spec is the container's OCI runtime spec as JSON.
	Spec []byte
	// Rootfs opens what the container changed in its root filesystem, as a tar
	// stream in the format of OCI layers, plain or compressed by gzip or zstd.
	// It may be called more than once. Nil means no changes.
	Rootfs func(context.Context) (io.ReadCloser, error)
	// Deleted are paths that the container deleted from its root filesystem
	// and that Rootfs says nothing of.
	Deleted []string
	// Base is the image that the container was made from.
	Base *Base
	// Created is when the processes were frozen.
	Created time.Time
	// Container and Host become part of the checkpoint's config. What the
	// images tell better is filled in from there.
	Container checkpoint.Container
	Host      checkpoint.Host
}

// Base is an image that a container was made from.
type Base struct {
	// Reference is the image's name, for people.
	Reference string
	// Digest is that of its manifest or index.
	Digest digest.Digest
	// Config is the image's config as JSON.
	Config []byte
	// Layers are in the order of the manifest.
	Layers []BaseLayer
}

// BaseLayer is one layer of a base image.
type BaseLayer struct {
	Descriptor v1.Descriptor
	// Repositories are those that the layer is known to have come from, with
	// host ("registry.example/team/app"). The host's port may be missing.
	Repositories []string
	// Open reads the layer from the node, or is nil if the node does not have
	// it. It is used when the target has no other way to get the layer.
	Open func(context.Context) (io.ReadCloser, error)
}
