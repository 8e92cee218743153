#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# fuzz.sh [COUNT]: runs each fuzz target of the project for COUNT inputs (as go test's -fuzztime has it: 20000x, or a time like 1m).
set -euo pipefail
cd "$(dirname "$0")/.."
count=${1:-20000x}

# go test takes one target at a time.
grep -rlE '^func Fuzz' --include='*_test.go' . | sort | while read -r file; do
	package=./$(dirname "${file#./}")
	for target in $(grep -oE '^func Fuzz[A-Za-z0-9_]*' "$file" | cut -d' ' -f2); do
		echo "==> fuzz: $package $target ($count)"
		# No minimising: it may take longer than the run.
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$count" -fuzzminimizetime 10x "$package"
	done
done
