// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/urfave/cli/v2"
)

var checkCommand = &cli.Command{
	Name:         "check",
	Usage:        "say whether this node can restore checkpoints, and what it lacks",
	OnUsageError: onUsageError,
	Action:       func(*cli.Context) error { return nil },
}
