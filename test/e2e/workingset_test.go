// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// settled is what the daemon knows of a container when its shim has reported for the last time; it does so every second, as
// long as anything changes.
func settled(ctx context.Context, t *testing.T, s *stack.Stack, id string) *api.Status {
	t.Helper()
	pace := time.NewTicker(100 * time.Millisecond)
	defer pace.Stop()
	var last *api.Status
	for same := 0; same < 25; {
		if r := reported(ctx, t, s, id); r.GetState() == "lazy" {
			if last.GetFaults() != r.Faults {
				same = 0
			}
			last = r
			same++
		}
		select {
		case <-ctx.Done():
			t.Fatal(ctx.Err())
		case <-pace.C:
		}
	}
	return last
}

// TestWorkingSet: what the first reply of a restored server needs is recorded, and on a cold node the next restore has it
// before it asks; whether the node has recorded it by itself, in a trial, or finds it beside the image.
func TestWorkingSet(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	reply := func(name string, check bool) *api.Status {
		t.Helper()
		before := s.Registry.Traffic(nil)
		pod, c := lazily(ctx, t, s, ref)
		if _, err := get(ctx, pod, "/touch"); err != nil {
			t.Fatal(err)
		}
		after := s.Registry.Traffic(nil)
		status := settled(ctx, t, s, c.ID)
		t.Logf("%s: %d faults, %d of them remote; %d requests, %d bytes", name, status.Faults, status.RemoteFaults, after.Requests-before.Requests, after.Sent-before.Sent)
		if check { // which touches everything
			if err := verify(ctx, pod); err != nil {
				t.Error(err)
			}
		}
		if err := pod.Remove(ctx); err != nil {
			t.Fatal(err)
		}
		return status
	}
	if _, err := thaw(ctx, s, "workingset", "push", ref); err == nil || !strings.Contains(err.Error(), "recorded no working set") {
		t.Errorf("push before there is a set: %v", err)
	}
	const few = 5
	first := reply("first", false).RemoteFaults
	if first <= few {
		t.Errorf("%d remote faults without a working set: this proves nothing", first)
	}
	out, err := thaw(ctx, s, "workingset", "record", "--probe", "8080/touch", ref)
	if err != nil || !strings.HasPrefix(out, "recorded ") {
		t.Fatalf("%q, %v", out, err)
	}
	pushed, err := thaw(ctx, s, "workingset", "push", ref)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(pushed, ref[:strings.LastIndex(ref, ":")]+"@sha256:") {
		t.Errorf("pushed %q", pushed)
	}
	if err := s.ClearThawCache(ctx, "workingsets"); err != nil {
		t.Fatal(err)
	}
	if st := reply("recorded", true); st.RemoteFaults > few {
		t.Errorf("%d remote faults with a recorded working set, %d without", st.RemoteFaults, first)
	}
	if err := s.ClearThawCache(ctx); err != nil {
		t.Fatal(err)
	}
	if st := reply("published", true); st.RemoteFaults > few {
		t.Errorf("%d remote faults with a published working set, %d without", st.RemoteFaults, first)
	}
}
