// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// RestoreOptions are the options of a restore that runc does not set, or sets
// otherwise. runc hands CRIU the file that they are written to (annotation
// org.criu.config), and CRIU reads it after runc's own options, so they win.
//
// Nothing in them comes from a pod or an image.
type RestoreOptions struct {
	// LazyPages leaves private anonymous memory to the fault handler that listens
	// on lazy-pages.socket in CRIU's work directory.
	LazyPages bool
	// LogFile is where CRIU logs: a name in its work directory, or an absolute
	// path.
	LogFile string
	// Mounts are those that CRIU is given: paths by their keys in the images.
	Mounts map[string]string
	// Verbosity is CRIU's log level: 1 errors, 2 warnings, 3 information, 4 debug.
	Verbosity int
}

// Fixed options of every restore (CRIU, criu/config.c; criu(8)).
var fixed = []string{
	// Connections of the dumped pod cannot be continued from another address:
	// close them, so that both sides learn of it at once.
	"tcp-close",
	// flock and fcntl locks are part of the state.
	"file-locks",
	// runc puts the tree into the container's control group before it starts; CRIU
	// must not move anything to where the images say.
	"manage-cgroups=ignore",
}

// Encode returns the content of a CRIU config file: an option a line. It fails
// if a value could be taken for something else by CRIU's parser, which knows
// quotes and comments.
func (o RestoreOptions) Encode() ([]byte, error) {
	if o.Verbosity < 0 || o.Verbosity > 4 {
		return nil, fmt.Errorf("CRIU verbosity %d is not between 0 and 4", o.Verbosity)
	}
	if !plainPath(o.LogFile) {
		return nil, fmt.Errorf("CRIU log file %.80q: only letters, digits and /._- may be in its path", o.LogFile)
	}
	var b strings.Builder
	if o.LazyPages {
		b.WriteString("lazy-pages\n")
	}
	for _, f := range fixed {
		b.WriteString(f + "\n")
	}
	for _, key := range slices.Sorted(maps.Keys(o.Mounts)) {
		if !plainPath(key) || !PlainPath(o.Mounts[key]) {
			return nil, fmt.Errorf("mount %.80q at %.80q: only letters, digits and /._~- may be in it", key, o.Mounts[key])
		}
		fmt.Fprintf(&b, "external mnt[%s]:%s\n", key, o.Mounts[key])
	}
	// Written with "=", since CRIU's parser would make two words of it otherwise
	// and the option's value is optional.
	fmt.Fprintf(&b, "verbosity=%d\n", o.Verbosity)
	fmt.Fprintf(&b, "log-file %s\n", o.LogFile)
	return []byte(b.String()), nil
}

// PlainPath reports whether an absolute path can be a mount's in RestoreOptions.
func PlainPath(p string) bool {
	return path.IsAbs(p) && plainPath(strings.ReplaceAll(p, "~", "-"))
}

func plainPath(p string) bool {
	const most = 1024
	if p == "" || len(p) > most || path.Clean(p) != p || strings.HasPrefix(p, "..") || strings.HasPrefix(p, "-") {
		return false
	}
	for _, c := range []byte(p) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("/._-", c) >= 0:
		default:
			return false
		}
	}
	return true
}
