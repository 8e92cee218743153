// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"net/http"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// eventually waits until the daemon's report of a container is as it should be.
func eventually(ctx context.Context, t *testing.T, s *stack.Stack, id, what string, is func(*api.Status) bool) *api.Status {
	t.Helper()
	pace := time.NewTicker(100 * time.Millisecond)
	defer pace.Stop()
	for {
		status := reported(ctx, t, s, id)
		if status != nil && is(status) {
			return status
		}
		select {
		case <-ctx.Done():
			t.Fatalf("not %s: %+v", what, status)
		case <-pace.C:
		}
	}
}

// reported is what thaw ps tells of a container, nil if nothing.
func reported(ctx context.Context, t *testing.T, s *stack.Stack, id string) *api.Status {
	t.Helper()
	out, err := thaw(ctx, s, "ps", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var list api.ListResponse
	if err := protojson.Unmarshal([]byte(out), &list); err != nil {
		t.Fatal(err)
	}
	for _, r := range list.Restores {
		if r.ContainerId == id {
			return r
		}
	}
	return nil
}

// TestPolicies: what happens to memory that is not touched is as the pod's annotation says.
func TestPolicies(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	const all = 64 << 20 // bytes of the server's memory, which does not compress
	run := func(t *testing.T, policy string) (*stack.Pod, *stack.Container) {
		t.Helper()
		if err := s.ClearThawCache(ctx); err != nil {
			t.Fatal(err)
		}
		pod, c := restore(ctx, t, s, ref, stack.ContainerOptions{Env: synthetic, Annotations: map[string]string{"thaw.dev/policy": policy}})
		t.Cleanup(func() { // before the cache is cleared for the next
			if err := pod.Remove(ctx); err != nil {
				t.Error(err)
			}
		})
		if _, err := get(ctx, pod, "/touch"); err != nil {
			t.Fatal(err)
		}
		return pod, c
	}
	// offline checks all memory while the registry answers nothing.
	offline := func(pod *stack.Pod) error {
		s.Registry.Intercept(func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
		})
		defer s.Registry.Intercept(nil)
		return verify(ctx, pod)
	}
	t.Run("complete", func(t *testing.T) {
		begin := time.Now()
		pod, c := run(t, "complete")
		eventually(ctx, t, s, c.ID, "complete", func(r *api.Status) bool { return r.State == "complete" && r.PagesPresent == r.PagesTotal })
		t.Logf("complete after %v", time.Since(begin))
		if err := offline(pod); err != nil {
			t.Error(err)
		}
	})
	t.Run("cached", func(t *testing.T) {
		pod, c := run(t, "cached")
		st := eventually(ctx, t, s, c.ID, "in the page store", func(r *api.Status) bool { return r.BytesFetched >= all })
		if st.State != "lazy" || st.PagesPresent > st.PagesTotal/2 {
			t.Errorf("the process got more than it touched: %+v", st)
		}
		if err := offline(pod); err != nil {
			t.Error(err)
		}
	})
	t.Run("lazy", func(t *testing.T) {
		_, c := run(t, "lazy")
		// Longer than the other policies took.
		if st := settled(ctx, t, s, c.ID); st.BytesFetched > all/4 || st.PagesPresent > st.PagesTotal/2 {
			t.Errorf("more was fetched than was touched: %+v", st)
		}
	})
}
