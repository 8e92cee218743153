// SPDX-License-Identifier: Apache-2.0

package image

import (
	"github.com/checkpoint-restore/go-criu/v7/crit/images/cpuinfo"
)

// cpuBits are the places of a few features in the capability words that CRIU
// records in cpuinfo.img: word 0 is cpuid 1 EDX, 4 is cpuid 1 ECX and 9 is cpuid 7
// EBX, as in the kernel's cpufeatures.h.
var cpuBits = []struct {
	word, bit int
	flag      string
}{
	{0, 25, "sse"},
	{0, 26, "sse2"},
	{4, 0, "pni"},
	{4, 1, "pclmulqdq"},
	{4, 9, "ssse3"},
	{4, 12, "fma"},
	{4, 13, "cx16"},
	{4, 19, "sse4_1"},
	{4, 20, "sse4_2"},
	{4, 22, "movbe"},
	{4, 23, "popcnt"},
	{4, 25, "aes"},
	{4, 26, "xsave"},
	{4, 28, "avx"},
	{4, 29, "f16c"},
	{4, 30, "rdrand"},
	{9, 0, "fsgsbase"},
	{9, 3, "bmi1"},
	{9, 5, "avx2"},
	{9, 8, "bmi2"},
	{9, 16, "avx512f"},
	{9, 17, "avx512dq"},
	{9, 18, "rdseed"},
	{9, 19, "adx"},
	{9, 21, "avx512ifma"},
	{9, 23, "clflushopt"},
	{9, 24, "clwb"},
	{9, 28, "avx512cd"},
	{9, 29, "sha_ni"},
	{9, 30, "avx512bw"},
	{9, 31, "avx512vl"},
}

// CPUFeatures returns the instruction-set features that every processor of the
// dump's node had, as /proc/cpuinfo names them; none if the dump left cpuinfo.img
// out, which it does unless asked. It knows the most used ones of x86 only.
func (d *Dir) CPUFeatures() ([]string, error) {
	e := &cpuinfo.CpuinfoEntry{}
	if _, err := d.one("cpuinfo.img", magicCPUInfo, e); err != nil || len(e.GetX86Entry()) == 0 {
		return nil, err
	}
	var out []string
	for _, b := range cpuBits {
		all := true
		for _, c := range e.GetX86Entry() {
			words := c.GetCapability()
			all = all && b.word < len(words) && words[b.word]&(1<<b.bit) != 0
		}
		if all {
			out = append(out, b.flag)
		}
	}
	return out, nil
}
