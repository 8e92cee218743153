// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"thaw.dev/thaw/criu"
)

// criuLog is the name of the log that CRIU writes in its work directory.
const criuLog = "dump.log"

// maxLog bounds in bytes how much of CRIU's log is kept.
const maxLog = 64 << 20

// versionIn returns CRIU's version as it says it at the beginning of its log, or
// "".
func versionIn(log io.Reader) string {
	const near = 64 << 10
	s := bufio.NewScanner(io.LimitReader(log, near))
	for s.Scan() {
		if _, v, ok := strings.Cut(s.Text(), ") Version: "); ok {
			v, _, _ = strings.Cut(v, " ")
			return v
		}
	}
	return ""
}

// remedies are for those errors of CRIU that the user can do something about.
var remedies = []struct{ has, do string }{
	{"Unsupported proto 262", "the program uses Multipath TCP, as Go programs do when they listen: start it with GODEBUG=multipathtcp=0 in its environment"},
	{"Can't get rlimit", "containerd lacks CAP_SYS_RESOURCE, which CRIU needs for processes of other users"},
	{"No space left on device", "the tmpfs is full: enlarge it or name another with --dump-dir"},
}

// explain makes one line of a failed dump and keeps CRIU's log.
func explain(id, work, logDir string, cause error) error {
	f, err := os.Open(filepath.Join(work, criuLog))
	if err != nil { // CRIU did not run
		return fmt.Errorf("container %s cannot be dumped: %w", short(id), cause)
	}
	defer f.Close()
	what, err := criu.FirstError(f)
	if err != nil || what == "" {
		what = cause.Error()
	}
	if r := remedy(what, versionIn(io.NewSectionReader(f, 0, maxLog))); r != "" {
		what += ": " + r
	}
	kept, err := keepLog(f, id, logDir)
	if err != nil {
		return fmt.Errorf("container %s cannot be dumped: CRIU: %s (its log could not be kept: %w)", short(id), what, err)
	}
	return fmt.Errorf("container %s cannot be dumped: CRIU: %s (log: %s)", short(id), what, kept)
}

func remedy(what, version string) string {
	for _, r := range remedies {
		if strings.Contains(what, r.has) {
			return r.do
		}
	}
	have, err := criu.ParseVersion(version)
	if err != nil {
		return ""
	}
	kernel, err := criu.KernelVersion()
	if err != nil {
		return ""
	}
	if need, why := criu.Required(kernel); have.Less(need) {
		return fmt.Sprintf("CRIU is %s, install %s or later: %s", have, need, why)
	}
	return ""
}

func keepLog(f *os.File, id, logDir string) (string, error) {
	if logDir == "" {
		logDir = defaultLogDir
	}
	dir := filepath.Join(logDir, id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	name := filepath.Join(dir, criuLog)
	out, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return "", err
	}
	defer out.Close()
	if _, err := io.Copy(out, io.NewSectionReader(f, 0, maxLog)); err != nil {
		return "", err
	}
	return name, out.Close()
}
