// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"fmt"
	"sync"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
)

// Images is the node's image store, as far as a restore needs it. Names that it
// does not have are errdefs.ErrNotFound.
type Images interface {
	// Target returns what an image name stands for.
	Target(ctx context.Context, namespace, name string) (v1.Descriptor, error)
	// ContainerImage returns the image name in a container's record; it may be
	// empty.
	ContainerImage(ctx context.Context, namespace, id string) (string, error)
	// Content returns a blob, whose digest was verified when it was stored.
	Content(ctx context.Context, namespace string, desc v1.Descriptor) ([]byte, error)
}

// Containerd is containerd's image store. It connects when it is first used, as
// daemon and containerd may start in any order. Close it.
type Containerd struct {
	// Address is the path of containerd's gRPC socket.
	Address string

	mu     sync.Mutex
	client *containerd.Client
}

var _ Images = (*Containerd)(nil)

func (c *Containerd) connect(ctx context.Context, namespace string) (*containerd.Client, context.Context, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client == nil {
		client, err := containerd.New(c.Address)
		if err != nil {
			return nil, nil, fmt.Errorf("containerd at %s (check containerd.address in thaw's configuration): %w: %w", c.Address, err, errdefs.ErrUnavailable)
		}
		c.client = client
	}
	return c.client, namespaces.WithNamespace(ctx, namespace), nil
}

// Close ends the connection.
func (c *Containerd) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client == nil {
		return nil
	}
	return c.client.Close()
}

// Target returns what an image name stands for.
func (c *Containerd) Target(ctx context.Context, namespace, name string) (v1.Descriptor, error) {
	client, ctx, err := c.connect(ctx, namespace)
	if err != nil {
		return v1.Descriptor{}, err
	}
	img, err := client.ImageService().Get(ctx, name)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("image %s in containerd's image store: %w", name, err)
	}
	return img.Target, nil
}

// ContainerImage returns the image name in a container's record.
func (c *Containerd) ContainerImage(ctx context.Context, namespace, id string) (string, error) {
	client, ctx, err := c.connect(ctx, namespace)
	if err != nil {
		return "", err
	}
	rec, err := client.ContainerService().Get(ctx, id)
	if err != nil {
		return "", fmt.Errorf("container %s in containerd's store: %w", id, err)
	}
	return rec.Image, nil
}

// Content reads a blob from the content store.
func (c *Containerd) Content(ctx context.Context, namespace string, desc v1.Descriptor) ([]byte, error) {
	if desc.Size < 0 || desc.Size > checkpoint.MaxManifestSize {
		return nil, fmt.Errorf("%s is %d bytes large, allowed are %d: %w", desc.Digest, desc.Size, checkpoint.MaxManifestSize, errdefs.ErrResourceExhausted)
	}
	client, ctx, err := c.connect(ctx, namespace)
	if err != nil {
		return nil, err
	}
	p, err := content.ReadBlob(ctx, client.ContentStore(), desc)
	if err != nil {
		return nil, fmt.Errorf("%s in containerd's content store: %w", desc.Digest, err)
	}
	return p, nil
}
