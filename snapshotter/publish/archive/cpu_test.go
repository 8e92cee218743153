// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cpuinfo"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/snapshotter/publish"
)

// What CRIU recorded of the processor becomes part of the checkpoint's description,
// by which a node without those features refuses it.
func TestCPUFeatures(t *testing.T) {
	f, err := os.Open(sample)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a := &Archive{dir: t.TempDir(), Source: &publish.Source{}}
	if err := unpack(t.Context(), f, a.dir, 0); err != nil {
		t.Fatal(err)
	}
	words := make([]uint32, 20)
	words[9] = 1 << 5 // avx2
	m, err := proto.Marshal(&cpuinfo.CpuinfoEntry{X86Entry: []*cpuinfo.CpuinfoX86Entry{{
		VendorId: cpuinfo.CpuinfoX86Entry_INTEL.Enum(), CpuFamily: proto.Uint32(6), Model: proto.Uint32(1), Stepping: proto.Uint32(1),
		CapabilityVer: proto.Uint32(2), Capability: words,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	var img []byte
	for _, v := range []uint32{0x54564319, 0x61404013, uint32(len(m))} {
		img = binary.LittleEndian.AppendUint32(img, v)
	}
	if err := os.WriteFile(filepath.Join(a.dir, imagesDir, "cpuinfo.img"), append(img, m...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.read(); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if got := a.Source.Host.CPUFeatures; !slices.Equal(got, []string{"avx2"}) {
		t.Errorf("features %v", got)
	}
}
