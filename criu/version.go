// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// Version is a version of criu, or of the kernel.
type Version struct{ Major, Minor, Patch int }

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch) }

// Less reports whether v is older than w.
func (v Version) Less(w Version) bool {
	if v.Major != w.Major {
		return v.Major < w.Major
	}
	if v.Minor != w.Minor {
		return v.Minor < w.Minor
	}
	return v.Patch < w.Patch
}

// ParseVersion reads a version such as "4.1.1", "6.18" or "6.18.44-generic".
func ParseVersion(s string) (Version, error) {
	var v Version
	rest := strings.TrimSpace(s)
	for i, to := range []*int{&v.Major, &v.Minor, &v.Patch} {
		n := 0
		for n < len(rest) && rest[n] >= '0' && rest[n] <= '9' {
			n++
		}
		x, err := strconv.ParseUint(rest[:n], 10, 16)
		if err != nil {
			if i == 2 { // two numbers are enough
				break
			}
			return Version{}, fmt.Errorf("%.40q is no version: %w", s, errdefs.ErrInvalidArgument)
		}
		*to = int(x)
		if rest = rest[n:]; !strings.HasPrefix(rest, ".") {
			if i == 0 {
				return Version{}, fmt.Errorf("%.40q is no version: %w", s, errdefs.ErrInvalidArgument)
			}
			break
		}
		rest = rest[1:]
	}
	return v, nil
}

// Minimum is the oldest CRIU that thaw works with: older ones lay the vDSO out
// wrongly on kernels from 6.14 on, and do not record every thread's no_new_privs and
// ambient capabilities.
var Minimum = Version{4, 1, 0}

// Kernels from 6.16 on refuse to say whether an internet socket passes
// credentials; CRIU before 4.2 takes that for a failure and cannot dump a
// container with such a socket.
var (
	socketKernel = Version{6, 16, 0}
	socketCRIU   = Version{4, 2, 0}
)

// Required returns the oldest CRIU that works on a kernel, and why.
func Required(kernel Version) (Version, string) {
	if !kernel.Less(socketKernel) {
		return socketCRIU, fmt.Sprintf("older ones cannot dump network sockets on kernels from %d.%d on", socketKernel.Major, socketKernel.Minor)
	}
	return Minimum, "older ones fail on kernels from 6.14 on (vDSO layout)"
}

// Binary is an installed criu.
type Binary struct {
	Path    string
	Version Version
}

// commandTime bounds one run of criu that only answers a question.
const commandTime = 10 * time.Second

// Find locates criu and asks for its version. path is a file, or "" or a plain
// name to look for in PATH. It is errdefs.ErrNotFound if there is none.
func Find(ctx context.Context, path string) (*Binary, error) {
	if path == "" {
		path = "criu"
	}
	file, err := exec.LookPath(path)
	if err != nil {
		return nil, fmt.Errorf("criu is not installed (%s): install CRIU %s or later: %w", path, Minimum, errdefs.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	var out bounded
	cmd := exec.CommandContext(ctx, file, "--version")
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s --version: %w", file, err)
	}
	v, err := parseVersionOutput(out.String())
	if err != nil {
		return nil, fmt.Errorf("%s --version: %w", file, err)
	}
	return &Binary{Path: file, Version: v}, nil
}

// parseVersionOutput reads what `criu --version` prints: "Version: 4.1.1", and a
// line about git if it was built from there.
func parseVersionOutput(out string) (Version, error) {
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "Version:"); ok {
			return ParseVersion(v)
		}
	}
	return Version{}, errors.New("no version in its output")
}

// Check returns nil if the binary is new enough for the kernel, else an error
// that is errdefs.ErrFailedPrecondition.
func (b *Binary) Check(kernel Version) error {
	need, why := Required(kernel)
	if b.Version.Less(need) {
		return fmt.Errorf("CRIU %s at %s is too old, %s or later is needed: %s: %w", b.Version, b.Path, need, why, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Supports asks criu whether it and the kernel have a feature of `criu check
// --feature`, such as "uffd-noncoop". detail is what criu says if not.
func (b *Binary) Supports(ctx context.Context, feature string) (ok bool, detail string, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	var out bounded
	cmd := exec.CommandContext(ctx, b.Path, "check", "--feature", feature)
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.Exited() {
		return false, clean(out.String(), maxQuoted), nil
	}
	return err == nil, "", err
}

// bounded keeps the beginning of what is written to it.
type bounded struct{ bytes.Buffer }

const maxOutput = 16 << 10

func (b *bounded) Write(p []byte) (int, error) {
	if room := maxOutput - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
