// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"golang.org/x/sys/unix"
)

// PageSize is the size in bytes of the pages in images.
const PageSize = 4096

// maxAddress is the end of the user part of an address space (5-level paging,
// Documentation/arch/x86/x86_64/5level-paging.rst).
const maxAddress = 1 << 56

// Memory is a process's address space without its content.
type Memory struct {
	// Exe is the file ID of the process's executable.
	Exe uint32
	// Areas are in ascending order and do not overlap, apart from areas of
	// the kind AreaGuard, which come last and lie within others.
	Areas []Area
}

// Area is one mapping.
type Area struct {
	Start, End uint64 // page aligned
	Offset     uint64 // of a mapped file, in bytes
	// File is the file ID of a mapped file, or the ID of a shared memory
	// segment (pagemap-shmem-ID.img).
	File   uint64
	Prot   uint32 // as in mmap(2): PROT_
	Flags  uint32 // as in mmap(2): MAP_
	Status Status
	Access uint32 // as in open(2): how CRIU opens a mapped file
	Advice uint64 // bit n is set if the advice n of madvise(2) was given
}

// Mapped reports whether the area is a mapping of an open file (File).
func (a Area) Mapped() bool { return a.Status&(AreaFilePrivate|AreaFileShared) != 0 }

// Status is what an area is (CRIU, criu/include/image.h).
type Status uint32

// Bits of Status.
const (
	AreaRegular       Status = 1 << 0
	AreaStack         Status = 1 << 1
	AreaVsyscall      Status = 1 << 2
	AreaVDSO          Status = 1 << 3
	AreaHeap          Status = 1 << 5
	AreaFilePrivate   Status = 1 << 6
	AreaFileShared    Status = 1 << 7
	AreaAnonShared    Status = 1 << 8
	AreaAnonPrivate   Status = 1 << 9
	AreaSysVIPC       Status = 1 << 10
	AreaSocket        Status = 1 << 11
	AreaVVAR          Status = 1 << 12
	AreaAIORing       Status = 1 << 13
	AreaMemFD         Status = 1 << 14
	AreaShadowStack   Status = 1 << 15
	AreaGuard         Status = 1 << 16 // pages that MADV_GUARD_INSTALL made inaccessible
	AreaUprobes       Status = 1 << 17
	areaKnown                = 1<<18 - 1
	areaSpecialKernel        = AreaVsyscall | AreaVDSO | AreaVVAR
)

// Lazy reports whether CRIU registers the area with userfaultfd in a lazy
// restore (CRIU, criu/include/vma.h). Lazy pages anywhere else would never be
// filled.
func (a Area) Lazy() bool {
	return a.Flags&unix.MAP_ANONYMOUS != 0 && a.Flags&unix.MAP_PRIVATE != 0 &&
		a.Flags&(unix.MAP_LOCKED|unix.MAP_HUGETLB) == 0 && a.Status&areaSpecialKernel == 0
}

// maxAreas bounds the mappings of all processes of a dump. A process has a few
// hundred, at most 65,530 (vm.max_map_count).
const maxAreas = 2 << 20

// memory reads mm-PID.img. left is how many mappings there may still be.
func (d *Dir) memory(pid uint32, left *int) (*Memory, error) {
	name := fmt.Sprintf("mm-%d.img", pid)
	e := &mm.MmEntry{}
	found, err := d.one(name, magicMM, e)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, fmt.Errorf("%w: %s is missing", ErrFormat, name)
	}
	if *left -= len(e.GetVmas()); *left < 0 {
		return nil, fmt.Errorf("%w: the processes have more than %d mappings", ErrFormat, maxAreas)
	}
	m := &Memory{Exe: e.GetExeFileId(), Areas: make([]Area, 0, len(e.GetVmas()))}
	var end uint64
	for _, v := range e.GetVmas() {
		a := Area{
			Start: v.GetStart(), End: v.GetEnd(), Offset: v.GetPgoff(), File: v.GetShmid(),
			Prot: v.GetProt(), Flags: v.GetFlags(), Status: Status(v.GetStatus()),
			Advice: v.GetMadv(),
		}
		// As CRIU does (criu/files-reg.c).
		switch {
		case v.Fdflags != nil:
			a.Access = v.GetFdflags()
		case a.Prot&unix.PROT_WRITE != 0 && a.Status&AreaFileShared != 0:
			a.Access = unix.O_RDWR
		}
		// The vsyscall page lies in the kernel's half of the address space.
		if a.Start >= a.End || (a.Start|a.End)%PageSize != 0 || a.End > maxAddress && a.Status&AreaVsyscall == 0 {
			return nil, fmt.Errorf("%w: %s has a mapping from %#x to %#x", ErrFormat, name, a.Start, a.End)
		}
		if a.Status&^areaKnown != 0 {
			return nil, fmt.Errorf("%w: %s has a mapping at %#x of unknown kind %#x", ErrFormat, name, a.Start, uint32(a.Status))
		}
		if a.Status&AreaGuard == 0 {
			if a.Start < end {
				return nil, fmt.Errorf("%w: %s has overlapping mappings at %#x", ErrFormat, name, a.Start)
			}
			end = a.End
		}
		m.Areas = append(m.Areas, a)
	}
	return m, nil
}

// FS is a process's place in the filesystem.
type FS struct {
	Cwd, Root uint32 // file IDs
}

func (d *Dir) fs(pid uint32) (*FS, error) {
	name := fmt.Sprintf("fs-%d.img", pid)
	e := &fs.FsEntry{}
	found, err := d.one(name, magicFS, e)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, fmt.Errorf("%w: %s is missing", ErrFormat, name)
	}
	return &FS{Cwd: e.GetCwdId(), Root: e.GetRootId()}, nil
}
