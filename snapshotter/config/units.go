// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration that is written as in Go ("1m30s").
type Duration time.Duration

// UnmarshalText parses a duration.
func (d *Duration) UnmarshalText(p []byte) error {
	v, err := time.ParseDuration(string(p))
	*d = Duration(v)
	return err
}

// MarshalText writes a duration.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Size is a number of bytes. It is written as a string with one of the units
// KiB, MiB, GiB, TiB, or without a unit ("512MiB", "4096").
type Size int64

var units = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// UnmarshalText parses a size.
func (s *Size) UnmarshalText(p []byte) error {
	text, unit := strings.TrimSpace(string(p)), int64(1)
	for _, u := range units {
		if t, ok := strings.CutSuffix(text, u.name); ok {
			text, unit = strings.TrimSpace(t), u.bytes
			break
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/unit {
		return fmt.Errorf("%q is not a size: write it like \"512MiB\"", p)
	}
	*s = Size(n * unit)
	return nil
}

// MarshalText writes a size with the largest unit that divides it.
func (s Size) MarshalText() ([]byte, error) {
	for _, u := range units {
		if s != 0 && int64(s)%u.bytes == 0 {
			return []byte(strconv.FormatInt(int64(s)/u.bytes, 10) + u.name), nil
		}
	}
	return []byte(strconv.FormatInt(int64(s), 10)), nil
}
