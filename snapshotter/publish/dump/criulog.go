// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// criuLog is the name of the log that CRIU writes in its work directory.
const criuLog = "dump.log"

// maxLog bounds in bytes how much of CRIU's log is read and kept.
const maxLog = 64 << 20

var (
	// (00.012345) Error (criu/sk-inet.c:191): inet: Connected TCP socket ...
	logError   = regexp.MustCompile(`^\(\d+\.\d+\)\s+(?:\d+: )?Error \([^)]*\): (.*)`)
	logVersion = regexp.MustCompile(`^\(\d+\.\d+\) Version: (\S+)`)
)

// scanLog returns CRIU's version and the first error in its log.
func scanLog(r io.Reader) (version, firstError string) {
	s := bufio.NewScanner(io.LimitReader(r, maxLog))
	for s.Scan() {
		if m := logVersion.FindStringSubmatch(s.Text()); m != nil && version == "" {
			version = m[1]
		}
		// CRIU raises its own limit of open files and goes on if it may not.
		if m := logError.FindStringSubmatch(s.Text()); m != nil && !strings.Contains(m[1], "RLIMIT_NOFILE for self") {
			return version, strings.TrimSpace(m[1])
		}
	}
	return version, ""
}

// remedies are for those errors of CRIU that the user can do something about.
var remedies = []struct{ has, do string }{
	{"Unsupported proto 262", "the program uses Multipath TCP, as Go programs do when they listen: start it with GODEBUG=multipathtcp=0 in its environment"},
	{"Can't get rlimit", "containerd lacks CAP_SYS_RESOURCE, which CRIU needs for processes of other users"},
	{"Unexpected rt vDSO area bounds", "this CRIU does not know this kernel: install CRIU 4.1 or later"},
	{"No space left on device", "the tmpfs is full: enlarge it or name another with --dump-dir"},
	{"userfaultfd", "the container was restored and its memory is not complete yet"},
}

// explain makes one line of a failed dump and keeps CRIU's log.
func explain(id, work, logDir string, cause error) error {
	f, err := os.Open(filepath.Join(work, criuLog))
	if err != nil { // CRIU did not run
		return fmt.Errorf("container %s cannot be dumped: %w", short(id), cause)
	}
	defer f.Close()
	_, first := scanLog(f)
	if first == "" {
		first = cause.Error()
	}
	for _, r := range remedies {
		if strings.Contains(first, r.has) {
			first += ": " + r.do
			break
		}
	}
	kept, err := keepLog(f, id, logDir)
	if err != nil {
		return fmt.Errorf("container %s cannot be dumped: CRIU: %s (its log could not be kept: %w)", short(id), first, err)
	}
	return fmt.Errorf("container %s cannot be dumped: CRIU: %s (log: %s)", short(id), first, kept)
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
