// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/google/go-containerregistry/pkg/name"
	ggcrregistry "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"thaw.dev/thaw/snapshotter/api"
)

// try runs the command with a configuration that exists nowhere else.
func try(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	t.Setenv("THAW_CONFIG", emptyConfig(t))
	var out, errs bytes.Buffer
	code = run(context.Background(), append([]string{"thaw"}, args...), &out, &errs)
	return code, out.String(), errs.String()
}

func emptyConfig(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestUsage(t *testing.T) {
	for _, tc := range []struct {
		args string
		code int
		says string // on standard error
	}{
		{"", 0, ""},
		{"--help", 0, ""},
		{"checkpoint --help", 0, ""},
		{"freeze", 2, `unknown command "freeze"`},
		{"checkpoint", 2, "CONTAINER is missing"},
		{"checkpoint abc", 2, "--push REF is missing"},
		{"checkpoint abc --push UPPER", 2, "no image reference"},
		{"checkpoint --push r/x:1 abc def", 2, `unexpected argument "def"`},
		{"checkpoint --psh x abc", 2, "psh"},
		{"checkpoint abc --push", 2, "flag needs an argument"},
		{"checkpoint abc --push r/x:1 -a /nowhere/containerd.sock", 1, "containerd does not answer"},
		{"checkpoint abc --push r/x:1 --encrypt-for jwe:/nowhere/key.pem", 1, "no such file"},
		{"checkpoint abc --push r/x:1 --encrypt-for pgp:me", 1, "use jwe:FILE"},
		{"checkpoint abc --push r/x:1 --encrypt-for jwe:key.pem --reuse r/x:2", 2, "--reuse does not go with --encrypt-for"},
		{"convert archive", 2, "REF is missing"},
		{"convert /nowhere/archive r/x:1", 1, "no such file"},
		{"inspect", 2, "REF is missing"},
		{"inspect UPPER", 1, "no image reference"},
		{"ps extra", 2, "unexpected argument"},
		{"ps --socket /nowhere/thaw.sock", 1, "thaw-snapshotter is not running"},
		{"workingset", 0, ""},
		{"workingset pull", 2, `unknown command "pull"`},
		{"workingset record", 2, "REF is missing"},
		{"workingset record --probe /x r/x:1", 2, "PORT/PATH"},
		{"workingset record --pod-config /nowhere/pod.json r/x:1", 1, "no such file"},
		{"workingset record --socket /nowhere/thaw.sock r/x:1", 1, "thaw-snapshotter is not running"},
		{"workingset push", 2, "REF is missing"},
		{"workingset push UPPER --socket /nowhere/thaw.sock", 1, "no image reference"},
		{"serve", 2, "REF is missing"},
		{"serve --port 70000 r/x:1", 2, "no port 70000"},
		{"serve UPPER", 1, "no image reference"},
		{"completion", 2, "SHELL is missing"},
		{"completion tcsh", 2, "bash, zsh and fish"},
	} {
		code, _, stderr := try(t, strings.Fields(tc.args)...)
		if code != tc.code || !strings.Contains(stderr, tc.says) {
			t.Errorf("thaw %s: exit %d, %q", tc.args, code, stderr)
		}
		if strings.Count(stderr, "\n") > 1 {
			t.Errorf("thaw %s: more than one line: %q", tc.args, stderr)
		}
	}
}

func TestReorder(t *testing.T) {
	commands := newApp(io.Discard, io.Discard).Commands
	for in, want := range map[string]string{
		"thaw checkpoint abc --push r/x:1 --leave-running": "thaw checkpoint --push r/x:1 --leave-running abc",
		"thaw checkpoint abc --push=r/x:1 -n ns":           "thaw checkpoint --push=r/x:1 -n ns abc",
		"thaw checkpoint --leave-running abc --push r/x:1": "thaw checkpoint --leave-running --push r/x:1 abc",
		"thaw workingset push r/x:1 --socket s -c f":       "thaw workingset push --socket s -c f r/x:1",
		"thaw --debug ps --json":                           "thaw --debug ps --json",
		"thaw checkpoint -- --push abc":                    "thaw checkpoint -- --push abc",
		"thaw checkpoint a -- --push":                      "thaw checkpoint a -- --push",
		"thaw nothing a -b":                                "thaw nothing a -b",
		"thaw":                                             "thaw",
		"thaw checkpoint abc --generate-bash-completion":   "thaw checkpoint abc --generate-bash-completion",
	} {
		if got := strings.Join(reorder(commands, strings.Fields(in)), " "); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if code, out, _ := try(t, "completion", shell); code != 0 || !strings.Contains(out, "thaw") {
			t.Errorf("%s: exit %d, %q", shell, code, out)
		}
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 10 << 10: "10 KiB", 1 << 20: "1.0 MiB", 1023 << 10: "1.0 MiB", 5 << 29: "2.5 GiB"} {
		if got := size(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

// daemon answers List.
type daemon struct {
	api.NodeService
	restores []*api.Status
}

func (d daemon) List(context.Context, *api.ListRequest) (*api.ListResponse, error) {
	return &api.ListResponse{Restores: d.restores}, nil
}

func serve(t *testing.T, restores ...*api.Status) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "thaw.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterNodeService(s, daemon{restores: restores})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(context.Background(), l) }()
	t.Cleanup(func() { s.Close(); <-done })
	return socket
}

func TestPs(t *testing.T) {
	socket := serve(t,
		&api.Status{
			ContainerId: strings.Repeat("a", 64), Pod: "default/agent", Image: "r/x:1", State: "lazy", PagesTotal: 1000, PagesPresent: 250, Faults: 40, RemoteFaults: 3,
			FaultWaitP50Ns: 12_000, FaultWaitP99Ns: 3_400_000, BytesFetched: 5 << 20, StartedUnixNs: time.Now().Add(-time.Minute).UnixNano(),
		},
		&api.Status{ContainerId: "b", State: "failed", Reason: "no \x1b[31mCPU"},
	)
	code, out, stderr := try(t, "ps", "--socket", socket)
	if code != 0 {
		t.Fatal(stderr)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines: %q", len(lines), out)
	}
	for _, want := range []string{"aaaaaaaaaaaaa ", "default/agent", "r/x:1", "lazy", "25%", "12us", "3.4ms", "5.0 MiB", "1m0s"} {
		if !strings.Contains(lines[1], want) {
			t.Errorf("%q is not in %q", want, lines[1])
		}
	}
	if !strings.Contains(lines[2], "failed: no [31mCPU") {
		t.Errorf("%q", lines[2])
	}

	code, out, stderr = try(t, "ps", "--json", "--socket", socket)
	var parsed struct {
		Restores []map[string]any `json:"restores"`
	}
	if err := json.Unmarshal([]byte(out), &parsed); code != 0 || err != nil || len(parsed.Restores) != 2 {
		t.Errorf("exit %d, %v, %q %q", code, err, out, stderr)
	}
}

func TestCheck(t *testing.T) {
	socket := serve(t)
	code, out, stderr := try(t, "check", "--json", "--socket", socket, "-a", "/nowhere/containerd.sock")
	var all []finding
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		t.Fatal(err)
	}
	if code != 1 || stderr != "" {
		t.Errorf("exit %d, %q", code, stderr)
	}
	for _, f := range all {
		switch {
		case f.Name == "daemon" && !f.OK, f.Name == "containerd" && f.OK, f.Name == "", f.Detail == "":
			t.Errorf("%+v", f)
		}
	}
	if !slices.ContainsFunc(all, func(f finding) bool { return f.Name == "userfaultfd" }) {
		t.Errorf("%+v", all)
	}
}

func TestConvertAndInspect(t *testing.T) {
	srv := httptest.NewServer(ggcrregistry.New(ggcrregistry.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	host := strings.TrimPrefix(srv.URL, "http://")
	base, err := name.ParseReference(host + "/base:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(base, empty.Image); err != nil {
		t.Fatal(err)
	}
	code, out, stderr := try(t, "convert", "../../snapshotter/publish/testdata/checkpoint.tar.zst", host+"/cp:1", "--base", base.String())
	if code != 0 {
		t.Fatal(stderr)
	}
	if !strings.HasPrefix(out, host+"/cp@sha256:") || strings.Count(out, "\n") != 1 || stderr != "" {
		t.Errorf("printed %q and %q", out, stderr)
	}
	code, out, stderr = try(t, "inspect", host+"/cp:1")
	if code != 0 {
		t.Fatal(stderr)
	}
	for _, want := range []string{"tcp listen 0.0.0.0:8080", "/etc/hosts", "CRIU 4.2.1", "lazy 816 KiB (zero 96 KiB)", "6 chunks, 6 of them used", "tiny"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in %q", want, out)
		}
	}
	code, out, _ = try(t, "inspect", "--json", host+"/cp:1")
	var x inspection
	if err := json.Unmarshal([]byte(out), &x); code != 0 || err != nil || len(x.Config.Processes) != 2 {
		t.Errorf("exit %d, %v, %q", code, err, out)
	}
	key := filepath.Join(t.TempDir(), "key.jwk")
	const jwk = `{"kty":"EC","crv":"P-256","alg":"ECDH-ES+A256KW","kid":"node-7\u001b","x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"}`
	if err := os.WriteFile(key, []byte(jwk), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, stderr = try(t, "convert", "../../snapshotter/publish/testdata/checkpoint.tar.zst", host+"/cp:2", "--base", base.String(), "--encrypt-for", "jwe:"+key)
	if code != 0 || !strings.Contains(stderr, "wrote to its root filesystem") || !strings.Contains(stderr, "is not encrypted") {
		t.Errorf("encrypted: exit %d, %q", code, stderr)
	}
	code, out, stderr = try(t, "inspect", host+"/cp:2")
	if code != 0 || !strings.Contains(out, "Encrypted for:  jwe") || !strings.Contains(out, "key node-7") || strings.Contains(out, "\x1b") {
		t.Errorf("encrypted: exit %d, %q, %q", code, out, stderr)
	}
	code, out, _ = try(t, "inspect", "--json", host+"/cp:2")
	x = inspection{}
	if err := json.Unmarshal([]byte(out), &x); code != 0 || err != nil || len(x.Encrypted) != 1 || x.Sizes.Pages == 0 {
		t.Errorf("encrypted: exit %d, %v, %q", code, err, out)
	}
	if code, _, stderr := try(t, "inspect", base.String()); code != 1 || !strings.Contains(stderr, "holds no checkpoint") {
		t.Errorf("ordinary image: exit %d, %q", code, stderr)
	}
}
