// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/criulog"
)

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
	f, err := os.Open(filepath.Join(work, criulog.Dump))
	if err != nil { // CRIU did not run
		return fmt.Errorf("container %s cannot be dumped: %w", short(id), cause)
	}
	defer f.Close()
	what, err := criu.FirstError(f)
	if err != nil || what == "" {
		what = cause.Error()
	}
	if r := remedy(what, versionIn(io.NewSectionReader(f, 0, criulog.MaxSize))); r != "" {
		what += ": " + r
	}
	kept, err := criulog.Keep(cmp.Or(logDir, criulog.Dir), id, work, criulog.Dump)
	if err != nil {
		return fmt.Errorf("container %s cannot be dumped: CRIU: %s (%w)", short(id), what, err)
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
