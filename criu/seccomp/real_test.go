// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"testing"

	"thaw.dev/thaw/criu/image"
)

// containerd is the filter that runc made of containerd's profile, with more than a few instructions.
func containerd(t testing.TB) []byte {
	t.Helper()
	d, err := image.Open("../image/testdata/nginx")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	filters, err := d.Filters()
	if err != nil {
		t.Fatal(err)
	}
	if n := len(filters[0].Program) / instructionSize; n < 100 {
		t.Fatalf("%d instructions", n)
	}
	return filters[0].Program
}

// prefixed is the same filter as other bytes.
func prefixed(p []byte) []byte { return append(encode(instruction{code: opGoto}), p...) }

func TestContainerd(t *testing.T) {
	p := containerd(t)
	if err := covers(prefixed(p), p); err != nil {
		t.Error(err)
	}
	if err := covers(p, prefixed(p)); err != nil {
		t.Error(err)
	}
	if err := covers(encode(ret(allow)), p); err == nil {
		t.Error("a filter that lets all through covers it")
	}
	// Each answer that is no "allow" made one, as far as it is ever given.
	parsed, err := parse(p)
	if err != nil {
		t.Fatal(err)
	}
	changed := 0
	reached := reachable(parsed)
	for i, in := range parsed {
		if in.code != opReturn || in.k == allow || !reached[i] {
			continue
		}
		weak := append([]instruction(nil), parsed...)
		weak[i].k = allow
		if err := covers(encode(weak...), p); err == nil {
			t.Errorf("answer %d of %#x may be given up", i, in.k)
		}
		if err := covers(p, encode(weak...)); err != nil {
			t.Errorf("it does not cover a weaker one: %v", err)
		}
		changed++
	}
	if changed == 0 {
		t.Error("it refuses nothing")
	}
}

// reachable tells which instructions some jump leads to: libseccomp leaves an answer at the end that is never given.
func reachable(p []instruction) []bool {
	at := make([]bool, len(p)+1)
	at[0] = true
	for i, in := range p {
		switch {
		case !at[i] || in.code == opReturn:
		case in.code == opGoto:
			at[i+1+int(in.k)] = true
		default: // jt and jf of what is no jump are 0
			at[i+1+int(in.jt)], at[i+1+int(in.jf)] = true, true
		}
	}
	return at
}

func BenchmarkCovers(b *testing.B) {
	p := containerd(b)
	other := prefixed(p)
	for b.Loop() {
		if err := covers(other, p); err != nil {
			b.Fatal(err)
		}
	}
}
