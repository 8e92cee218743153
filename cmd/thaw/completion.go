// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/urfave/cli/v2"
)

var completionCommand = &cli.Command{
	Name:      "completion",
	Usage:     "print a shell's completion script",
	ArgsUsage: "bash|zsh|fish",
	Description: `Examples:
  thaw completion bash > /etc/bash_completion.d/thaw
  source <(thaw completion zsh)
  thaw completion fish > ~/.config/fish/completions/thaw.fish`,
	OnUsageError: onUsageError,
	BashComplete: func(c *cli.Context) { fmt.Fprintln(c.App.Writer, "bash\nzsh\nfish") },
	Action: func(c *cli.Context) error {
		args, err := arguments(c, "SHELL")
		if err != nil {
			return err
		}
		switch args[0] {
		case "bash":
			fmt.Fprint(c.App.Writer, bashCompletion)
		case "zsh":
			fmt.Fprint(c.App.Writer, zshCompletion)
		case "fish":
			script, err := c.App.ToFishCompletion()
			if err != nil {
				return err
			}
			fmt.Fprint(c.App.Writer, script)
		default:
			return usagef("completion: no script for %q: there are bash, zsh and fish", args[0])
		}
		return nil
	},
}

// Both ask the program itself for what may follow.
const bashCompletion = `# bash completion for thaw
_thaw() {
	local cur words
	cur="${COMP_WORDS[COMP_CWORD]}"
	words=("${COMP_WORDS[@]:0:$COMP_CWORD}")
	if [[ "$cur" == -* ]]; then
		words+=("$cur")
	fi
	COMPREPLY=($(compgen -W "$("${words[@]}" --generate-bash-completion 2>/dev/null)" -- "$cur"))
}
complete -o bashdefault -o default -F _thaw thaw
`

const zshCompletion = `#compdef thaw
_thaw() {
	local -a opts
	local cur=${words[-1]}
	if [[ "$cur" == -* ]]; then
		opts=("${(@f)$(${words[@]:0:#words[@]-1} ${cur} --generate-bash-completion 2>/dev/null)}")
	else
		opts=("${(@f)$(${words[@]:0:#words[@]-1} --generate-bash-completion 2>/dev/null)}")
	fi
	if [[ -n "${opts[1]}" ]]; then
		_describe 'values' opts
	else
		_files
	fi
}
compdef _thaw thaw
`
