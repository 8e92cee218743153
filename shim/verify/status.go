// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"thaw.dev/thaw/criu/image"
)

// maxStatus bounds /proc/PID/status in bytes: 65536 groups are most of it.
const maxStatus = 1 << 20

func read(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxStatus+1))
	if err == nil && len(p) > maxStatus {
		err = fmt.Errorf("%s has more than %d bytes", path, maxStatus)
	}
	return string(p), err
}

// thread reads a thread's credentials as the kernel shows them in a folder of
// /proc.
func (l *looker) thread(dir string) (*image.Thread, error) {
	text, err := read(filepath.Join(dir, "status"))
	if err != nil {
		return nil, err
	}
	th, err := parseStatus(text)
	if err != nil {
		return nil, fmt.Errorf("%s/status: %w", dir, err)
	}
	if p := l.spec.Process; p.ApparmorProfile != "" || p.SelinuxLabel != "" {
		label, err := read(filepath.Join(dir, "attr/current"))
		if err != nil {
			return nil, err
		}
		th.Creds.LSMProfile = strings.TrimRight(label, "\n\x00")
	}
	return th, nil
}

// parseStatus reads /proc/PID/status (proc_pid_status(5)). What thaw compares must be
// in it.
func parseStatus(text string) (*image.Thread, error) {
	th := &image.Thread{}
	c := &th.Creds
	capabilities := func(to *image.Capabilities) func(string) error {
		return func(v string) error {
			n, err := strconv.ParseUint(v, 16, 64)
			*to = image.Capabilities(n)
			return err
		}
	}
	ids := func(to ...*uint32) func(string) error {
		return func(v string) error {
			n, err := numbers(v)
			if err == nil && len(n) != len(to) {
				err = fmt.Errorf("%d numbers, %d belong there", len(n), len(to))
			}
			if err != nil {
				return err
			}
			for i := range to {
				*to[i] = n[i]
			}
			return nil
		}
	}
	fields := map[string]func(string) error{
		"Name": func(v string) error { th.Comm = v; return nil },
		// The last is what the thread has in its own PID namespace.
		"NSpid": func(v string) error {
			n, err := numbers(v)
			if err == nil && len(n) > 0 {
				th.TID = n[len(n)-1]
			}
			return err
		},
		"Uid":    ids(&c.UID, &c.EUID, &c.SUID, &c.FSUID),
		"Gid":    ids(&c.GID, &c.EGID, &c.SGID, &c.FSGID),
		"Groups": func(v string) (err error) { c.Groups, err = numbers(v); return err },
		"CapInh": capabilities(&c.Inheritable), "CapPrm": capabilities(&c.Permitted), "CapEff": capabilities(&c.Effective),
		"CapBnd": capabilities(&c.Bounding), "CapAmb": capabilities(&c.Ambient),
		"NoNewPrivs": func(v string) error { c.NoNewPrivs = v == "1"; return nil },
		"Seccomp": func(v string) error {
			n, err := strconv.ParseUint(v, 10, 32)
			th.Seccomp = image.SeccompMode(n)
			return err
		},
	}
	for line := range strings.SplitSeq(text, "\n") {
		key, v, _ := strings.Cut(line, ":")
		if set := fields[key]; set != nil {
			if err := set(strings.TrimSpace(v)); err != nil {
				return nil, fmt.Errorf("%s: %w", key, err)
			}
			delete(fields, key)
		}
	}
	for key := range fields {
		return nil, fmt.Errorf("%s is missing", key)
	}
	return th, nil
}

func numbers(v string) (out []uint32, err error) {
	for f := range strings.FieldsSeq(v) {
		n, err := strconv.ParseUint(f, 10, 32)
		if err != nil {
			return nil, err
		}
		out = append(out, uint32(n))
	}
	return out, nil
}
