// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// seccomped is a container under a seccomp profile.
func seccomped(p *cri.SecurityProfile) stack.ContainerOptions {
	return stack.ContainerOptions{Change: func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.Seccomp = p
		c.Linux.SecurityContext.NoNewPrivs = true
	}}
}

var (
	unconfined     = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
	runtimeDefault = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
)

// localhost writes a profile that lets all through but some system calls.
func localhost(t *testing.T, s *stack.Stack, but ...string) *cri.SecurityProfile {
	t.Helper()
	path := filepath.Join(s.Dir, "profile-"+strings.Join(but, "-")+".json")
	profile := specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: but, Action: specs.ActErrno}}}
	if runtime.GOARCH == "amd64" { // those that containerd's profile knows; runc lets no others through
		profile.Architectures = []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32}
	}
	p, err := json.Marshal(&profile)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, p, 0o600); err != nil {
		t.Fatal(err)
	}
	return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: path}
}

// profiled runs a container under a profile and checkpoints it.
func profiled(ctx context.Context, t *testing.T, s *stack.Stack, p *cri.SecurityProfile) (ref, before string) {
	t.Helper()
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "old", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	o := seccomped(p)
	o.Image = s.Workload(workloads.Pipeline)
	c, err := pod.Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	if before, err = logLines(ctx, pod, c); err != nil {
		t.Fatal(err)
	}
	ref = freeze(ctx, t, s, c)
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	return ref, before
}

// TestSeccomp restores checkpoints of containers with one seccomp profile in pods with another one.
func TestSeccomp(t *testing.T) {
	ctx, s := start(t, workloads.Pipeline)
	weak, strong := localhost(t, s, "unshare"), localhost(t, s, "unshare", "keyctl")
	restores := func(name, ref, before string, p *cri.SecurityProfile) {
		t.Run(name, func(t *testing.T) {
			pod, c := restore(ctx, t, s, ref, seccomped(p))
			observed(ctx, t, workloads.Pipeline, before, pod, c)
			got, err := c.Exec(ctx, "cat", "/proc/1/status")
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(got, "Seccomp:\t2\n") || !strings.Contains(got, "Seccomp_filters:\t1\n") || !strings.Contains(got, "NoNewPrivs:\t1\n") {
				t.Errorf("the first process has %q", got)
			}
			if err := pod.Remove(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	refuses := func(name, ref string, p *cri.SecurityProfile, words ...string) {
		t.Run(name, func(t *testing.T) {
			says(t, refused(ctx, t, s, ref, stack.PodOptions{}, seccomped(p)), append(words, "task 1 (", "seccompProfile")...)
		})
	}
	ref, _ := profiled(ctx, t, s, unconfined)
	refuses("none in a pod with the default", ref, runtimeDefault, "seccomp: the checkpoint has none")

	ref, before := profiled(ctx, t, s, runtimeDefault)
	restores("the default in a pod with it", ref, before, runtimeDefault)
	restores("the default in a pod with less", ref, before, weak)

	ref, before = profiled(ctx, t, s, weak)
	refuses("less in a pod with the default", ref, runtimeDefault, "seccomp filter: the checkpoint has one that lets system call")
	refuses("less in a pod with more", ref, strong, "seccomp filter: the checkpoint has one that lets system call")
	restores("the same profile", ref, before, weak)
}
