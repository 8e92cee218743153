// SPDX-License-Identifier: Apache-2.0

// Package profile tells which seccomp filter a container would be under that the
// node's runc starts with a spec.
//
// A restored container brings its filters along. To compare them with the spec one
// has to know what runc makes of it, which depends on runc's version, its libseccomp
// and the kernel; so runc itself is asked. It creates a container with the spec's
// seccomp section and nothing else that is the spec's, which is never started: in
// the state "created" its first process has the filter on and waits. The kernel
// shows the filter to a privileged tracer (ptrace(2), PTRACE_SECCOMP_GET_FILTER).
//
// That is done once for each profile and runc on a node, by a process of its own:
// tracing and waiting for children would be in the way of the shim's own reaper. The
// answers are kept in a folder on a tmpfs, so that none outlives the kernel that
// it was given by.
package profile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	runc "github.com/containerd/go-runc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	// askerName is the first argument of the process that asks runc.
	askerName = "thaw-seccomp"
	// timeout bounds how long asking may take.
	timeout = 20 * time.Second
	// maxProgram is the kernel's limit, in bytes.
	maxProgram = 4096 * instructionSize
	// maxReason bounds what an asker says on its standard error, in bytes.
	maxReason = 1 << 10

	instructionSize = 8
)

// Filter returns the program (struct sock_filter) that runc puts the processes of a
// container with this seccomp section under. The path of runc is absolute, or a name
// to be found in PATH. What was asked before is in the folder; it is made if it is not there. The
// error names why runc could not be asked, or what it said.
func Filter(ctx context.Context, dir, runtime string, s *specs.LinuxSeccomp) ([]byte, error) {
	if s.ListenerPath != "" {
		return nil, errors.New("seccomp profile: it has system calls decided by another program (listenerPath), which no restore can do: use a profile without SCMP_ACT_NOTIFY")
	}
	runtime, err := exec.LookPath(runtime)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	section, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	key, err := keyOf(runtime, section)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	p, err := readProgram(filepath.Join(dir, key))
	if errors.Is(err, os.ErrNotExist) {
		if err := ask(ctx, dir, runtime, key, section); err != nil {
			return nil, fmt.Errorf("seccomp profile: which filter %s makes of it is not known: %w", runtime, err)
		}
		p, err = readProgram(filepath.Join(dir, key))
	}
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w", err)
	}
	return p, nil
}

// keyOf names an answer by all that it depends on and that may change while the
// kernel runs. (A libseccomp that is updated below a runc may make another program,
// but none that means anything else.)
func keyOf(runtime string, section []byte) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(runtime, &st); err != nil {
		return "", fmt.Errorf("%s: %w", runtime, err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "1 %q %d %d %d %v %v\n", runtime, st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
	h.Write(section)
	return hex.EncodeToString(h.Sum(nil)), nil
}

// readProgram reads an answer. Answers are written at once or not at all.
func readProgram(path string) ([]byte, error) {
	p, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(p) == 0 || len(p) > maxProgram || len(p)%instructionSize != 0 {
		return nil, fmt.Errorf("%s has %d bytes, which is no filter: remove it", path, len(p))
	}
	return p, nil
}

// ask has a process of this program, as what Main is, ask runc.
func ask(ctx context.Context, dir, runtime, key string, section []byte) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{askerName, dir, runtime, key}
	cmd.Stdin = bytes.NewReader(section)
	said := &line{}
	cmd.Stderr = said
	// A shim waits for all its children in one place, which go-runc knows.
	exited, err := runc.Monitor.Start(cmd)
	if err != nil {
		return err
	}
	status, err := runc.Monitor.Wait(cmd, exited)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("no answer: %w", ctx.Err())
	case err != nil:
		return err
	case status != 0:
		return fmt.Errorf("%s", said)
	}
	return nil
}

// line keeps the beginning of what is written to it.
type line struct{ bytes.Buffer }

func (l *line) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), maxReason-l.Len())])
	return len(p), nil
}

func (l *line) String() string {
	return strings.ToValidUTF8(strings.Join(strings.Fields(l.Buffer.String()), " "), "?")
}
