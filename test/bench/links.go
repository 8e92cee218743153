// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// linkFacts are what a link was measured to be like, so that its name can be believed.
type linkFacts struct {
	name      string
	connect   time.Duration // from nothing to the first answer of a tiny request
	roundTrip time.Duration // the same on a connection that is open: the median
	rate      float64       // bytes a second of one large range on that connection
}

func (l linkFacts) String() string {
	return fmt.Sprintf("link %s: %.2f ms for a tiny request, %.2f ms with a new connection, %.1f MB/s for a large range",
		l.name, l.roundTrip.Seconds()*1000, l.connect.Seconds()*1000, l.rate/1e6)
}

// measureLinks sets the shaped link up and measures all.
func (b *bench) measureLinks(ctx context.Context, links []string) error {
	if slices.Contains(links, shaped) {
		if err := b.s.ServeShaped(ctx, shape); err != nil {
			return err
		}
	}
	const repository = "link"
	content := make([]byte, 64<<20)
	rand.NewChaCha8([32]byte{}).Read(content)
	layer := static.NewLayer(content, types.OCILayer)
	to, err := name.NewRepository(b.s.Registry.Ref(repository), name.Insecure)
	if err != nil {
		return err
	}
	if err := remote.WriteLayer(to, layer, remote.WithContext(ctx)); err != nil {
		return err
	}
	digest, err := layer.Digest()
	if err != nil {
		return err
	}
	for _, l := range links {
		facts, err := measureLink(ctx, registryOver(l), repository+"/blobs/"+digest.String(), int64(len(content)))
		if err != nil {
			return fmt.Errorf("%s: %w", l, err)
		}
		facts.name = l
		fmt.Fprintln(os.Stderr, facts)
		b.links = append(b.links, facts)
	}
	return nil
}

func measureLink(ctx context.Context, registry, blob string, size int64) (f linkFacts, err error) {
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	get := func(path string) (time.Duration, int64, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+registry+"/v2/"+path, nil)
		if err != nil {
			return 0, 0, err
		}
		began := time.Now()
		resp, err := client.Do(req)
		if err != nil {
			return 0, 0, err
		}
		defer resp.Body.Close()
		n, err := io.Copy(io.Discard, resp.Body)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", path, resp.Status)
		}
		return time.Since(began), n, err
	}
	if f.connect, _, err = get(""); err != nil {
		return f, err
	}
	times := make([]time.Duration, 101)
	for i := range times {
		if times[i], _, err = get(""); err != nil {
			return f, err
		}
	}
	slices.Sort(times)
	f.roundTrip = times[len(times)/2]
	took, n, err := get(blob)
	if err == nil && n != size {
		err = fmt.Errorf("%d bytes of %d arrived", n, size)
	}
	f.rate = float64(n) / took.Seconds()
	return f, err
}
