// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/publish"
)

// What is in the registry is named on standard output even if what comes after
// the push fails; what is not there is not.
func TestFinishNamesWhatWasPushed(t *testing.T) {
	const ref = "r/x@sha256:1"
	stop, push := errors.New("cannot be stopped"), errors.New("registry away")
	for name, tc := range map[string]struct {
		pushed, done error
		out          string
	}{
		"all well":    {nil, nil, ref + "\n"},
		"not stopped": {nil, stop, ref + "\n"},
		"not pushed":  {push, nil, ""},
		"neither":     {push, stop, ""},
	} {
		var out bytes.Buffer
		result := &publish.Result{Reference: ref, Config: &checkpoint.Config{}}
		if tc.pushed != nil {
			result = nil
		}
		err := finish(&out, newProgress(io.Discard, true), result, tc.pushed, tc.done)
		if out.String() != tc.out {
			t.Errorf("%s: printed %q, want %q", name, out.String(), tc.out)
		}
		for _, want := range []error{tc.pushed, tc.done} {
			if want != nil && !errors.Is(err, want) {
				t.Errorf("%s: error %v lacks %v", name, err, want)
			}
		}
		if tc.pushed == nil && tc.done == nil && err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
