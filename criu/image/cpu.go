// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cpuinfo"
)

// CPU describes an x86 processor as CRIU recorded it.
type CPU struct {
	// Words are the kernel's capability words in CRIU's order; see
	// arch/x86/include/asm/cpufeatures.h for the bits of the first ones.
	Words []uint32
	// XFeatures is the mask of processor states that the kernel saves.
	XFeatures uint64
	Model     string
}

// CPUs returns the processors in cpuinfo.img; none if the dump left it out,
// which it does unless asked.
func (d *Dir) CPUs() ([]CPU, error) {
	e := &cpuinfo.CpuinfoEntry{}
	if _, err := d.one("cpuinfo.img", magicCPUInfo, e); err != nil {
		return nil, err
	}
	const maxWords = 64
	var out []CPU
	for _, x := range e.GetX86Entry() {
		if len(x.GetCapability()) > maxWords {
			return nil, fmt.Errorf("%w: cpuinfo.img has %d capability words", ErrFormat, len(x.GetCapability()))
		}
		out = append(out, CPU{Words: x.GetCapability(), XFeatures: x.GetXfeaturesMask(), Model: x.GetModelId()})
	}
	return out, nil
}
