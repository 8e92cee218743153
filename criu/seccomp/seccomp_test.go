// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	allow  = unix.SECCOMP_RET_ALLOW
	refuse = unix.SECCOMP_RET_ERRNO | 1
	kill   = unix.SECCOMP_RET_KILL_PROCESS

	x86 = unix.AUDIT_ARCH_X86_64
)

func load(word uint32) instruction { return instruction{code: opLoad, k: 4 * word} }
func ret(k uint32) instruction     { return instruction{code: opReturn, k: k} }
func on(code uint16, k uint32, jt, jf uint8) instruction {
	return instruction{code: code, jt: jt, jf: jf, k: k}
}

func encode(p ...instruction) []byte {
	var b []byte
	for _, in := range p {
		b = binary.NativeEndian.AppendUint16(b, in.code)
		b = append(b, in.jt, in.jf)
		b = binary.NativeEndian.AppendUint32(b, in.k)
	}
	return b
}

func covers(have, want []byte) error {
	budget := MaxSteps
	return Covers(have, want, &budget)
}

// lets is a filter that lets some system calls through.
func lets(numbers ...uint32) []byte {
	p := []instruction{load(wordArch), on(opEqual, x86, 1, 0), ret(kill), load(wordNumber)}
	for _, n := range numbers {
		p = append(p, on(opEqual, n, 0, 1), ret(allow))
	}
	return encode(append(p, ret(refuse))...)
}

func TestCovers(t *testing.T) {
	// write with its first argument 1 or 2 only, once by equality, once by a bound.
	equal := encode(load(wordNumber), on(opEqual, 1, 1, 0), ret(refuse), load(5), on(opEqual, 0, 0, 3), load(4), on(opEqual, 1, 2, 0), on(opEqual, 2, 1, 0), ret(refuse), ret(allow))
	bound := encode(load(wordNumber), on(opEqual, 1, 0, 4), load(4), on(opMore, 2, 2, 0), load(5), on(opEnough, 1, 0, 1), ret(refuse), ret(allow))
	// clone without CLONE_NEWUSER, written in two ways.
	masked := encode(load(wordNumber), on(opEqual, 56, 0, 2), load(4), on(opAny, unix.CLONE_NEWUSER, 1, 0), ret(allow), ret(refuse))
	anded := encode(load(wordNumber), on(opEqual, 56, 0, 3), load(4), instruction{code: opAnd, k: unix.CLONE_NEWUSER}, on(opEqual, 0, 0, 1), ret(allow), ret(refuse))
	for name, tc := range map[string]struct {
		have, want []byte
		says       string // "": covers
	}{
		"the same":              {lets(1, 2, 3), lets(1, 2, 3), ""},
		"another order":         {lets(3, 1, 2), lets(1, 2, 3), ""},
		"fewer":                 {lets(2), lets(1, 2, 3), ""},
		"more":                  {lets(1, 2, 3, 272), lets(1, 2, 3), "lets system call 272 (architecture 0xc000003e)"},
		"all":                   {encode(ret(allow)), lets(1), "lets system call 0"},
		"none":                  {encode(ret(kill)), lets(1), ""},
		"other architectures":   {encode(load(wordNumber), on(opEqual, 1, 0, 1), ret(allow), ret(refuse)), lets(1), "one that lets"},
		"a milder answer":       {encode(ret(refuse)), encode(ret(kill)), "one that lets"},
		"a harder answer":       {encode(ret(kill)), encode(ret(refuse)), ""},
		"logged instead":        {encode(ret(unix.SECCOMP_RET_LOG)), encode(ret(refuse)), "one that lets"},
		"a range":               {encode(load(wordNumber), on(opEnough, 10, 1, 0), ret(allow), ret(refuse)), encode(load(wordNumber), on(opMore, 9, 1, 0), ret(allow), ret(refuse)), ""},
		"a range too long":      {encode(load(wordNumber), on(opMore, 10, 1, 0), ret(allow), ret(refuse)), encode(load(wordNumber), on(opMore, 9, 1, 0), ret(allow), ret(refuse)), "system call 10 "},
		"arguments":             {equal, bound, ""},
		"too many arguments":    {bound, equal, "system call 1 "}, // it lets 0 through
		"masks":                 {masked, anded, ""},
		"masks, the other way":  {anded, masked, ""},
		"without a mask":        {encode(load(wordNumber), on(opEqual, 56, 0, 1), ret(allow), ret(refuse)), masked, "system call 56"},
		"other bits":            {encode(load(wordNumber), on(opEqual, 56, 0, 2), load(4), on(opAny, unix.CLONE_NEWNET, 1, 0), ret(allow), ret(refuse)), masked, "system call 56"},
		"masked numbers":        {encode(load(wordNumber), on(opAny, 1<<3, 1, 0), ret(allow), ret(refuse)), lets(1), "computes with numbers"},
		"x32":                   {encode(load(wordNumber), on(opAny, 1<<30, 1, 0), ret(allow), ret(refuse)), encode(load(wordNumber), on(opEnough, 1<<30, 1, 0), ret(allow), ret(refuse)), "system call 2147483648 "},
		"without x32":           {encode(load(wordNumber), on(opEnough, 1<<30, 1, 0), ret(allow), ret(refuse)), encode(load(wordNumber), on(opAny, 1<<30, 1, 0), ret(allow), ret(refuse)), ""},
		"strange instruction":   {encode(instruction{code: unix.BPF_LD | unix.BPF_W | unix.BPF_LEN}, ret(allow)), lets(1), "cannot be compared (0x80 at 0)"},
		"jump out of it":        {encode(on(opEqual, 0, 9, 9), ret(allow)), lets(1), "cannot be compared"},
		"jump far out of it":    {encode(instruction{code: opGoto, k: ^uint32(0)}, ret(allow)), lets(1), "cannot be compared"},
		"no end":                {encode(load(wordNumber)), lets(1), "cannot be compared"},
		"load from nowhere":     {encode(load(words), ret(allow)), lets(1), "cannot be compared"},
		"half an instruction":   {make([]byte, 12), lets(1), "12 bytes"},
		"nothing":               {nil, lets(1), "0 bytes"},
		"strange want":          {lets(1), make([]byte, 8), "another one than the spec's"},
		"the same, and strange": {make([]byte, 8), make([]byte, 8), ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := covers(tc.have, tc.want)
			switch {
			case tc.says == "" && err != nil:
				t.Error(err)
			case tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says) || !strings.HasPrefix(err.Error(), "one that ") && !strings.HasPrefix(err.Error(), "another ")):
				t.Errorf("error %v does not say %q", err, tc.says)
			}
		})
	}
}

// A program that takes a new way at each instruction does not take for ever.
func TestCoversEnds(t *testing.T) {
	var p []instruction
	for i := range uint32(1000) {
		p = append(p, load(2+i%14), on(opEqual, i, 0, 0))
	}
	p = append(p, ret(allow))
	if err := covers(encode(p...), encode(ret(allow), ret(allow))); err != errSteps {
		t.Errorf("error %v", err)
	}
}

// run is the kernel's interpreter.
func run(p []instruction, data *[words]uint32) uint32 {
	var a uint32
	for pc := 0; ; pc++ {
		in := p[pc]
		var holds bool
		switch in.code {
		case opLoad:
			a = data[in.k/4]
			continue
		case opConst:
			a = in.k
			continue
		case opAnd:
			a &= in.k
			continue
		case opGoto:
			pc += int(in.k)
			continue
		case opReturn:
			return in.k
		case opEqual:
			holds = a == in.k
		case opMore:
			holds = a > in.k
		case opEnough:
			holds = a >= in.k
		case opAny:
			holds = a&in.k != 0
		}
		pc += jump(in, holds)
	}
}

// Whatever two programs are: if one covers the other, there is no call that it answers more mildly. Programs are small and
// their numbers few, so that many do.
func TestCoversIsTrue(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	few := func() uint32 { return r.Uint32N(4) }
	program := func() []instruction {
		n := 2 + r.IntN(8)
		p := make([]instruction, n)
		for i := range p {
			left := n - 1 - i
			p[i] = ret([]uint32{allow, refuse, kill}[r.IntN(3)])
			if left == 0 {
				break
			}
			switch r.IntN(8) {
			case 0, 1, 2:
				p[i] = load(few() % 4)
			case 3:
				p[i] = instruction{code: opAnd, k: few()}
			case 4, 5, 6:
				p[i] = on([]uint16{opEqual, opMore, opEnough, opAny}[r.IntN(4)], few(), uint8(r.IntN(left)), uint8(r.IntN(left)))
			}
		}
		return p
	}
	covered := 0
	for range 50000 {
		have, want := program(), program()
		if covers(encode(have...), encode(want...)) != nil {
			continue
		}
		covered++
		for i := range 256 {
			data := [words]uint32{uint32(i & 3), uint32(i >> 2 & 3), uint32(i >> 4 & 3), uint32(i >> 6)}
			if severity(run(have, &data)) > severity(run(want, &data)) {
				t.Fatalf("%v covers %v, but not for %v", have, want, data)
			}
		}
	}
	if covered < 1000 {
		t.Errorf("only %d pairs", covered)
	}
}
