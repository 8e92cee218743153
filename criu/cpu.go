// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// cpuInfo is where the kernel lists the processors' features.
const cpuInfo = "/proc/cpuinfo"

// CPUFeatures returns the instruction-set features of this node's processors, as
// /proc/cpuinfo names them, sorted: those that every processor has.
func CPUFeatures() ([]string, error) {
	f, err := os.Open(cpuInfo)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseCPUInfo(f)
}

func parseCPUInfo(r io.Reader) ([]string, error) {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	var common []string
	first := true
	for s.Scan() {
		key, value, ok := strings.Cut(s.Text(), ":")
		if key = strings.TrimSpace(key); !ok || key != "flags" && key != "Features" {
			continue
		}
		flags := strings.Fields(value)
		slices.Sort(flags)
		flags = slices.Compact(flags)
		if first {
			common, first = flags, false
			continue
		}
		common = slices.DeleteFunc(common, func(f string) bool {
			_, found := slices.BinarySearch(flags, f)
			return !found
		})
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	if first {
		return nil, errors.New("no processor features in " + cpuInfo)
	}
	return common, nil
}

// instructionFlags are the features that a program can find with cpuid and then
// depend on: without them it dies of an illegal instruction, or its registers
// have no room in the kernel's frame. Everything else that the kernel lists, such
// as its mitigations, power management, virtualisation, hints that older
// processors ignore and what only the kernel itself uses, is harmless to miss.
var instructionFlags = flagSet(`
		fpu cx8 cmov mmx fxsr sse sse2 syscall mmxext 3dnow 3dnowext lm
		pni pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm abm sse4a
		xop fma4 tbm bmi1 bmi2 avx2 fsgsbase rdseed adx clflushopt clwb clflush clzero sha_ni rdpid 
		rtm mpx pku ospke waitpkg movdiri movdir64b enqcmd serialize monitorx mwaitx 
		xsaveopt xsavec xgetbv1 gfni vaes vpclmulqdq sha512 sm3 sm4 rao_int cmpccxadd user_shstk
		avx512f avx512dq avx512ifma avx512pf avx512er avx512cd avx512bw avx512vl avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg
		avx512_vpopcntdq avx512_4vnniw avx512_4fmaps avx512_bf16 avx512_fp16 avx512_vp2intersect avx_vnni avx_ifma avx_vnni_int8
		avx_vnni_int16 avx_ne_convert avx10 amx_tile amx_int8 amx_bf16 amx_fp16 amx_complex rdtscp lwp
		fp asimd pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm jscvt fcma lrcpc dcpop sha3 asimddp sha512
		sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint
		svei8mm svef32mm svef64mm svebf16 i8mm bf16 rng bti mte ecv afp rpres mte3 sme wfxt ebf16 sme2 lrcpc3 lse128 mops`)

func flagSet(flags string) map[string]bool {
	set := make(map[string]bool)
	for _, f := range strings.Fields(flags) {
		set[f] = true
	}
	return set
}

// MissingCPUFeatures returns the features of the node of a dump that this node
// lacks and a program can depend on, sorted.
func MissingCPUFeatures(dumped, here []string) []string {
	var out []string
	for _, f := range dumped {
		if instructionFlags[f] && !slices.Contains(here, f) {
			out = append(out, f)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// CheckCPU returns nil if programs from a node with the features dumped run on
// one with those in here; else an error that names what is missing and is
// errdefs.ErrFailedPrecondition.
func CheckCPU(dumped, here []string) error {
	missing := MissingCPUFeatures(dumped, here)
	if len(missing) == 0 {
		return nil
	}
	const most = 8
	names := missing
	more := ""
	if len(names) > most {
		names, more = names[:most], fmt.Sprintf(" and %d more", len(missing)-most)
	}
	return fmt.Errorf("this node's processor lacks %s%s, which the checkpoint's node had and its programs may use: restore on a node with a processor like that: %w",
		strings.Join(names, ", "), more, errdefs.ErrFailedPrecondition)
}
