// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// reorder moves a command's flags before its arguments, because people write
// them behind as well and the cli package takes them for arguments there.
func reorder(commands []*cli.Command, args []string) []string {
	for i := 1; i < len(args); i++ {
		if strings.HasPrefix(args[i], "-") {
			continue // a flag of the program itself: all of these are boolean
		}
		for _, c := range commands {
			if c.HasName(args[i]) {
				if parts(c) {
					return append(append([]string{}, args[:i]...), reorder(c.Subcommands, args[i:])...)
				}
				flags, rest := split(c.Flags, args[i+1:])
				out := append([]string{}, args[:i+1]...)
				return append(append(out, flags...), rest...)
			}
		}
		return args
	}
	return args
}

// parts reports whether a command is made of others. The cli package gives each
// command one that is named help.
func parts(c *cli.Command) bool {
	return slices.ContainsFunc(c.Subcommands, func(s *cli.Command) bool { return s.Name != "help" })
}

// split parts flags, with their values, from arguments.
func split(known []cli.Flag, args []string) (flags, rest []string) {
	for i := 0; i < len(args); i++ {
		a := args[i]
		switch {
		case a == "--":
			return flags, append(rest, args[i:]...)
		case len(a) < 2 || a[0] != '-':
			rest = append(rest, a)
		case a == "--generate-bash-completion":
			rest = append(rest, a) // must stay last
		default:
			flags = append(flags, a)
			if !takesValue(known, a) {
				continue
			}
			if i++; i == len(args) {
				return flags, nil // so that the cli package says what lacks
			}
			flags = append(flags, args[i])
		}
	}
	return flags, rest
}

// takesValue reports whether a flag's value is the next argument.
func takesValue(known []cli.Flag, arg string) bool {
	name := strings.TrimLeft(arg, "-")
	if strings.Contains(name, "=") {
		return false
	}
	for _, f := range known {
		for _, n := range f.Names() {
			if n == name {
				d, ok := f.(cli.DocGenerationFlag)
				return ok && d.TakesValue()
			}
		}
	}
	return false
}
