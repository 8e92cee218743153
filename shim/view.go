// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/snapshotter/premount"
)

// makeView makes the directory of CRIU images that one container is restored
// from: links to the images that all restores on the node share and nobody may
// write to, and in the place of those that name the container, new ones. The
// host name is the pod's, not that of the pod which was dumped.
//
// With a plan for mounts, the images that are different then are taken from where
// that lies.
//
// The links are hard ones, because CRIU opens some images when it is already in
// the container's mount namespace, where the path of a symbolic one means nothing.
func makeView(dir, shared, hostname string, plan *premount.Plan) error {
	entries, err := os.ReadDir(shared)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), "utsns-") {
			if err := os.WriteFile(path, criu.EncodeHostname(hostname), 0o600); err != nil {
				return err
			}
			continue
		}
		from := filepath.Join(shared, e.Name())
		if plan != nil {
			if slices.Contains(plan.Archives, e.Name()) {
				continue
			}
			if slices.Contains(plan.Images, e.Name()) {
				from = filepath.Join(premount.Folder(shared), e.Name())
			}
		}
		if err := os.Link(from, path); err != nil {
			return err
		}
	}
	return makeParent(dir, entries)
}

// hostnameOf returns the host name that a container of the spec has: that of
// the UTS namespace it joins, or the one that the spec gives to a new one, or
// else that of this process, which new UTS namespaces inherit
// (uts_namespaces(7)).
func hostnameOf(spec *specs.Spec) (string, error) {
	if spec.Linux != nil {
		for _, ns := range spec.Linux.Namespaces {
			if ns.Type == specs.UTSNamespace {
				if ns.Path != "" {
					return hostnameIn(ns.Path)
				}
				if spec.Hostname != "" {
					return spec.Hostname, nil
				}
			}
		}
	}
	return os.Hostname()
}

// hostnameIn reads the host name in a UTS namespace. The namespace of a thread
// cannot be given back with certainty, so a thread of its own enters it and
// ends there.
func hostnameIn(path string) (string, error) {
	type result struct {
		name string
		err  error
	}
	c := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		name, err := func() (string, error) {
			f, err := os.Open(path)
			if err != nil {
				return "", err
			}
			defer f.Close()
			if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWUTS); err != nil {
				return "", fmt.Errorf("enter UTS namespace %s: %w", path, err)
			}
			return os.Hostname()
		}()
		c <- result{name, err}
	}()
	r := <-c
	return r.name, r.err
}
