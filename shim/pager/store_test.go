// SPDX-License-Identifier: Apache-2.0

package pager

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestStoreCutShort: files that are cut short under the handler end the container with that reason, and nobody sees
// the zeros behind their end. The bitmap is read without a copy by the kernel, where its loss is a signal.
func TestStoreCutShort(t *testing.T) {
	for name, size := range map[string]func(c *checkpoint) error{
		"data":              func(c *checkpoint) error { return c.cut(0, 0) },
		"data, in its page": func(c *checkpoint) error { return c.cut(0, int64(len(c.data[0])-100)) },
		"bitmap":            func(c *checkpoint) error { return c.cut(1, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			cp := makeCheckpoint(t, 1024, 32, false, 1)
			first := true
			err := fatal(t, "read", fetchFunc(func(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error {
				if first {
					first = false
					cp.putAll(t)
					if err := size(cp); err != nil {
						return err
					}
				}
				return slow{cp, 0}.Fetch(ctx, blob, nil, u)
			}), nil, cp)
			if err == nil || !strings.Contains(err.Error(), "page store") || !strings.Contains(err.Error(), "cache folder") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// cut cuts one of the files in each store short.
func (c *checkpoint) cut(file int, size int64) error {
	for b := range c.data {
		if err := c.files[2*b+file].Truncate(size); err != nil {
			return err
		}
	}
	return nil
}

// TestStoreMadeAnew: a daemon that was started again has made other files, in which nothing is yet; the handler takes them
// and what it saw in the old ones stays right.
func TestStoreMadeAnew(t *testing.T) {
	cp := makeCheckpoint(t, 4096, 32, false, 1)
	v := startVictim(t, 4096, "read", 1, 0)
	fetches := 0
	var one sync.Mutex // at a time
	startPager(t, cp, fetchFunc(func(ctx context.Context, blob uint32, chunks []uint32, u Urgency) error {
		one.Lock()
		defer one.Unlock()
		if fetches++; fetches == 10 {
			if err := cp.renew(); err != nil {
				return err
			}
		}
		return slow{cp, 0}.Fetch(ctx, blob, chunks, u)
	}), Lazy, nil, v)
	v.run(time.Minute)
	if fetches < 10 {
		t.Errorf("%d fetches: the files were not made anew", fetches)
	}
}

// renew puts empty files in the place of the stores'.
func (c *checkpoint) renew() error {
	for b, s := range c.stores {
		clear(c.bits[b])
		for i, f := range []struct {
			name string
			size int
		}{{s.Data, len(c.data[b])}, {s.Present, len(c.bits[b])}} {
			if err := os.Remove(f.name); err != nil {
				return err
			}
			file, err := os.Create(f.name)
			if err != nil {
				return err
			}
			old := c.files[2*b+i]
			c.files[2*b+i] = file
			if err := old.Close(); err != nil {
				return err
			}
			if err := file.Truncate(int64(f.size)); err != nil {
				return err
			}
		}
	}
	return nil
}
