// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bufio"
	"errors"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// maxQuoted bounds in bytes what is quoted of a log.
	maxQuoted = 400
	// maxLine bounds a line of a log; what is longer is cut.
	maxLine = 4 << 10
	// maxLog bounds in bytes how much of a log is read.
	maxLog = 64 << 20
)

// errorLine is a line as CRIU writes it: "(00.052) pie: 12: Error (criu/mount.c:1234):
// mnt: message".
var errorLine = regexp.MustCompile(`^(?:\([0-9.]+\))?[^(]*\bError \([\w./-]+:[0-9]+\): (.*)$`)

// harmless are errors that CRIU carries on after: they are quoted only if there
// is no other.
var harmless = []string{
	"rlimit: Can't setup RLIMIT_NOFILE for self",
	"Can't get 1:16 opt", "Can't get 1:34 opt",
}

// FirstError returns what the first error in a CRIU log says, in one line and
// without control characters; "" if there is none. Errors that CRIU is known to
// survive count only if there is no other. The log is read in bounded memory.
func FirstError(log io.Reader) (string, error) {
	r := bufio.NewReaderSize(io.LimitReader(log, maxLog), maxLine)
	var survived string
	for {
		line, err := r.ReadSlice('\n')
		if m := errorLine.FindSubmatch([]byte(strings.TrimRight(string(line), "\n"))); m != nil {
			text := clean(string(m[1]), maxQuoted)
			if !isHarmless(text) {
				return text, nil
			}
			if survived == "" {
				survived = text
			}
		}
		for errors.Is(err, bufio.ErrBufferFull) { // the rest of a long line
			_, err = r.ReadSlice('\n')
		}
		if errors.Is(err, io.EOF) {
			return survived, nil
		}
		if err != nil {
			return survived, err
		}
	}
}

func isHarmless(text string) bool {
	for _, h := range harmless {
		if strings.Contains(text, h) {
			return true
		}
	}
	return false
}

// clean makes text safe to show in one line: what is not printable becomes a
// blank, and no more than most bytes remain.
func clean(text string, most int) string {
	text = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		for most > 0 && !utf8.RuneStart(text[most]) {
			most--
		}
		text = text[:most] + "..."
	}
	return text
}
