// SPDX-License-Identifier: Apache-2.0

// Package seccomp tells whether one seccomp filter is at least as strict as
// another.
//
// Filters are programs in classic BPF that see a system call's number, its
// architecture and its arguments (seccomp(2)). The same profile becomes another
// program with another version of the runtime, of libseccomp or of the kernel, so
// comparing bytes alone would tie a checkpoint to nodes of one make. Programs
// that differ are run side by side: for each number and architecture that either
// tells from others, and along each way that the arguments can make them take.
// What cannot be decided so counts as less strict.
package seccomp

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"
)

// instructionSize is that of struct sock_filter, in bytes.
const instructionSize = 8

type instruction struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

// Words of struct seccomp_data.
const (
	wordNumber = 0
	wordArch   = 1
	words      = 16
)

// Opcodes that filters of libseccomp and of runc are made of (linux/filter.h).
const (
	opLoad   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	opConst  = unix.BPF_LD | unix.BPF_IMM
	opAnd    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	opGoto   = unix.BPF_JMP | unix.BPF_JA
	opEqual  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	opMore   = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	opEnough = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	opAny    = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	opReturn = unix.BPF_RET | unix.BPF_K
)

// parse decodes a program, every jump of which it has checked. Instructions that it
// does not know are an error.
func parse(raw []byte) ([]instruction, error) {
	n := len(raw) / instructionSize
	if n == 0 || n > unix.BPF_MAXINSNS || len(raw)%instructionSize != 0 {
		return nil, fmt.Errorf("a program of %d bytes", len(raw))
	}
	p := make([]instruction, n)
	for i := range p {
		b := raw[i*instructionSize:]
		in := instruction{code: binary.NativeEndian.Uint16(b), jt: b[2], jf: b[3], k: binary.NativeEndian.Uint32(b[4:])}
		left := n - 1 - i // instructions behind this one
		var ok bool
		switch in.code {
		case opLoad:
			ok = in.k%4 == 0 && in.k/4 < words && left > 0
		case opConst, opAnd:
			ok = left > 0
		case opGoto:
			ok = uint64(in.k) < uint64(left)
		case opEqual, opMore, opEnough, opAny:
			ok = int(in.jt) < left && int(in.jf) < left
		case opReturn:
			ok = true
		}
		if !ok {
			return nil, fmt.Errorf("an instruction that cannot be compared (%#x at %d)", in.code, i)
		}
		p[i] = in
	}
	return p, nil
}

// Covers returns nil if have lets no system call through that want does not, and
// answers each at least as strictly in the order in which the kernel prefers the
// answers of several filters. Else the error says, as the end of a sentence about
// have, what it has: "one that ...". Both are programs as struct sock_filter. Programs that
// are not the same cost steps, of which budget is what is left: MaxSteps for all
// comparisons of one decision.
func Covers(have, want []byte, budget *int) error {
	if slices.Equal(have, want) {
		return nil
	}
	h, err := parse(have)
	if err != nil {
		return fmt.Errorf("one that has %w", err)
	}
	w, err := parse(want)
	if err != nil {
		return fmt.Errorf("another one than the spec's, which has %w", err)
	}
	c := comparison{have: h, want: w, steps: budget}
	numbers, archs := representatives(h, w)
	for _, c.arch = range archs {
		for _, c.number = range numbers {
			if err := c.compare(); err != nil {
				return err
			}
		}
	}
	return nil
}

// representatives returns numbers and architectures that stand for all: between two
// that neighbour a number in a program both behave the same.
func representatives(programs ...[]instruction) (numbers, archs []uint32) {
	of := [2][]uint32{{0, ^uint32(0)}, {0, ^uint32(0)}}
	for _, p := range programs {
		// What A may hold before each instruction: bit 0 the number, bit 1 the
		// architecture. Programs only go forward, so once through is enough.
		holds := make([]uint8, len(p)+1)
		for i, in := range p {
			h := holds[i]
			switch in.code {
			case opLoad:
				h = 0
				if in.k/4 <= wordArch {
					h = 1 << (in.k / 4)
				}
				holds[i+1] |= h
			case opConst:
			case opAnd:
				holds[i+1] |= h
			case opGoto:
				holds[i+1+int(in.k)] |= h
			case opReturn:
			default:
				holds[i+1+int(in.jt)] |= h
				holds[i+1+int(in.jf)] |= h
				for word := range of {
					if h&(1<<word) != 0 {
						of[word] = append(of[word], borders(in)...)
					}
				}
			}
		}
	}
	for word := range of {
		slices.Sort(of[word])
		of[word] = slices.Compact(of[word])
	}
	return of[wordNumber], of[wordArch]
}

// highBit is the lowest bit for which filters may test numbers of system calls: the
// one of the x32 architecture is the highest but one.
const highBit = 24

// borders returns the numbers on both sides of each place where the outcome of a jump
// changes.
func borders(in instruction) (out []uint32) {
	if in.code != opAny {
		return []uint32{in.k - 1, in.k, in.k + 1}
	}
	lowest := bits.TrailingZeros32(in.k)
	if lowest < highBit { // walk refuses it
		return nil
	}
	for at := uint64(0); at < 1<<32; at += 1 << lowest {
		out = append(out, uint32(at)-1, uint32(at))
	}
	return out
}

// severity orders actions as the kernel does: the lowest of several filters wins
// (kernel/seccomp.c, seccomp_run_filters).
func severity(ret uint32) int32 { return int32(ret & unix.SECCOMP_RET_ACTION_FULL) }
