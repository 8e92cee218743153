#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A shell pipeline: a producer, a filter, and a consumer that has spawned a child of its own. The sum is held only in the
# consumer's memory: each line of output must say "n=N sum=N*(N+1)/2", with N one more than before.
producer() {
	n=0
	while :; do
		n=$((n + 1))
		echo "tick $n"
		sleep 0.1
	done
}
producer | sed -u 's/tick //' | {
	sleep 1000000 &
	sum=0
	while read -r n; do
		sum=$((sum + n))
		echo "n=$n sum=$sum"
	done
}
