// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"errors"
	"fmt"
	"math/bits"
)

// MaxSteps is how many instructions a comparison may look at: some tenths of a second.
const MaxSteps = 1 << 25

var (
	errSteps  = errors.New("one that is too complex to be compared")
	errMasked = errors.New("one that computes with numbers of system calls, which cannot be compared")
)

// value is what the accumulator holds: the bits of mask of a word of the arguments, or
// a constant.
type value struct {
	word  uint32 // of struct seccomp_data; 0: a constant
	mask  uint32
	k     uint32 // of a constant
	fixed bool   // the constant is a number or architecture, for which representatives stand
}

// fact is what the way so far says of a word: word&mask compared with k.
type fact struct {
	word, mask, k uint32
	op            uint16 // opEqual, opMore or opEnough
	holds         bool
}

// comparison runs two programs for one system call.
type comparison struct {
	have, want   []instruction
	number, arch uint32
	facts        []fact
	steps        *int
}

// compare follows each way through have, and for each of its ends those through want.
func (c *comparison) compare() error {
	return c.walk(c.have, 0, value{}, func(ret uint32) error {
		return c.walk(c.want, 0, value{}, func(wanted uint32) error {
			if severity(ret) > severity(wanted) {
				return fmt.Errorf("one that lets system call %d (architecture %#x) do what the spec's does not", c.number, c.arch)
			}
			return nil
		})
	})
}

func (c *comparison) walk(p []instruction, pc int, a value, end func(ret uint32) error) error {
	for {
		if *c.steps--; *c.steps < 0 {
			return errSteps
		}
		in := p[pc]
		pc++
		switch in.code {
		case opLoad:
			switch word := in.k / 4; word {
			case wordNumber:
				a = value{k: c.number, fixed: true}
			case wordArch:
				a = value{k: c.arch, fixed: true}
			default:
				a = value{word: word, mask: ^uint32(0)}
			}
		case opConst:
			a = value{k: in.k}
		case opAnd:
			if a.fixed {
				return errMasked
			}
			a.mask &= in.k
			a.k &= in.k
		case opGoto:
			pc += int(in.k)
		case opReturn:
			return end(in.k)
		default:
			if in.code == opAny && a.fixed && bits.TrailingZeros32(in.k) < highBit {
				return errMasked
			}
			f, holds, known := c.decide(a, in)
			if !known {
				// Both ways; what is asked is known on each.
				f.holds = true
				if err := c.branch(p, pc, a, in, f, end); err != nil {
					return err
				}
				f.holds = false
				return c.branch(p, pc, a, in, f, end)
			}
			pc += jump(in, holds)
		}
	}
}

func (c *comparison) branch(p []instruction, pc int, a value, in instruction, f fact, end func(ret uint32) error) error {
	c.facts = append(c.facts, f)
	err := c.walk(p, pc+jump(in, f.holds != (in.code == opAny)), a, end)
	c.facts = c.facts[:len(c.facts)-1]
	return err
}

// jump is how far a jump leads whose condition holds, or not.
func jump(in instruction, holds bool) int {
	if holds {
		return int(in.jt)
	}
	return int(in.jf)
}

// decide returns whether a jump's condition holds, if that is known. If it is not, it returns what
// is asked. A test for any bit asks for the opposite, that none is set.
func (c *comparison) decide(a value, in instruction) (f fact, holds, known bool) {
	if a.word == 0 {
		switch in.code {
		case opEqual:
			return f, a.k == in.k, true
		case opMore:
			return f, a.k > in.k, true
		case opEnough:
			return f, a.k >= in.k, true
		}
		return f, a.k&in.k != 0, true
	}
	f = fact{word: a.word, mask: a.mask, k: in.k, op: in.code}
	if in.code == opAny {
		f.mask, f.k, f.op = a.mask&in.k, 0, opEqual
	}
	lowest, highest := uint64(0), uint64(f.mask)
	for _, g := range c.facts {
		if g.word != f.word {
			continue
		}
		if g.op == opEqual && g.holds && g.mask&f.mask == f.mask { // all bits are known
			v := uint64(g.k & f.mask)
			lowest, highest = v, v
			break
		}
		if g.mask != f.mask {
			continue
		}
		k := uint64(g.k)
		switch {
		case g.op == opEqual && f.op == opEqual && g.k == f.k: // it is not, or the case above
			return f, in.code == opAny, true
		case g.op == opMore && g.holds:
			lowest = max(lowest, k+1)
		case g.op == opMore:
			highest = min(highest, k)
		case g.op == opEnough && g.holds:
			lowest = max(lowest, k)
		case g.op == opEnough && k > 0:
			highest = min(highest, k-1)
		}
	}
	k := uint64(f.k)
	switch f.op {
	case opEqual:
		known = k < lowest || k > highest || f.k&^f.mask != 0 || lowest == highest
		holds = known && lowest == highest && k == lowest && f.k&^f.mask == 0
	case opMore:
		known, holds = lowest > k || highest <= k, lowest > k
	case opEnough:
		known, holds = lowest >= k || highest < k, lowest >= k
	}
	if in.code == opAny {
		holds = !holds
	}
	return f, holds, known
}
