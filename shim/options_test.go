// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// body is what CRI makes of the options table of a runtime handler.
const body = `
BinaryName = "/opt/runc"
Root = "/run/other"
SystemdCgroup = true
NoPivotRoot = true
ShimCgroup = "/shims"
TypeUrl = ""
ConfigPath = ""
`

func checkOptions(t *testing.T, got *anypb.Any, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	var o runcoptions.Options
	if err := typeurl.UnmarshalTo(got, &o); err != nil {
		t.Fatal(err)
	}
	if o.BinaryName != "/opt/runc" || o.Root != "/run/other" || !o.SystemdCgroup || !o.NoPivotRoot || o.ShimCgroup != "/shims" {
		t.Errorf("%v", &o)
	}
}

func marshal(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	a, err := typeurl.MarshalAnyToProto(m)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestOptions(t *testing.T) {
	got, err := convertOptions(marshal(t, &runtimeoptions.Options{ConfigBody: []byte(body)}))
	checkOptions(t, got, err)

	path := filepath.Join(t.TempDir(), "options.toml")
	if err := os.WriteFile(path, []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err = convertOptions(marshal(t, &runtimeoptions.Options{ConfigPath: path}))
	checkOptions(t, got, err)

	// runc's own message, as ctr and nerdctl send it, and nothing at all pass.
	own := marshal(t, &runcoptions.Options{BinaryName: "/x"})
	if got, err := convertOptions(own); err != nil || got != own {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := convertOptions(nil); err != nil || got != nil {
		t.Errorf("%v, %v", got, err)
	}
}

func TestOptionsOnAStream(t *testing.T) {
	in, err := proto.Marshal(marshal(t, &runtimeoptions.Options{ConfigBody: []byte(body)}))
	if err != nil {
		t.Fatal(err)
	}
	r, err := convertOptionsStream(bytes.NewReader(in))
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	var got anypb.Any
	checkOptions(t, &got, proto.Unmarshal(out, &got))
	r, err = convertOptionsStream(strings.NewReader(""))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := io.ReadAll(r); err != nil || len(out) != 0 {
		t.Errorf("no options became %q, %v", out, err)
	}
}

func TestBadOptions(t *testing.T) {
	for name, in := range map[string]*runtimeoptions.Options{
		"syntax":  {ConfigBody: []byte("BinaryName = ")},
		"type":    {ConfigBody: []byte("SystemdCgroup = \"yes\"")},
		"no file": {ConfigPath: "/nowhere/options.toml"},
	} {
		if _, err := convertOptions(marshal(t, in)); err == nil || !strings.Contains(err.Error(), "runtime options") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
