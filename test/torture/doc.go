// SPDX-License-Identifier: Apache-2.0

// Package torture tests that a program cannot tell that its memory comes lazily,
// whatever it does to it.
//
// The program in folder program does seeded random things to its memory and knows
// what each byte must be. A run dumps it in the middle with CRIU, makes a page
// index and page store of the dump as a node has them, restores it with shim/pager
// as the fault handler while chunks arrive late and in random order, and lets it go
// on to its end. There is no container, so that a run takes about a second.
//
// The seed decides what the program does; what its threads do at the same time and
// when chunks arrive differs from run to run. So a seed that failed once may need
// several runs to fail again:
//
//	make torture SEEDS=1000            fresh seeds
//	make torture FIRST=77 SEEDS=1 REPEAT=100
//
// Seeds that failed once are in testdata/seeds, one a file with a line that says why,
// and every test run repeats them.
package torture
