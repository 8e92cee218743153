// SPDX-License-Identifier: Apache-2.0

package image

// Parent is the name of the folder, among images, with those of the dump that they
// build on.
const Parent = "parent"

// EmptyParent returns images of a dump that has no page of any of the processes, by
// their names below the folder Parent.
//
// Pages must be missing until the fault handler fills them. With transparent huge
// pages on (`always`), the kernel gives a whole huge page when CRIU writes an eager
// page next to lazy ones, or into an area that lies beside a lazy one while CRIU puts
// them together: lazy pages are there then, and zero. CRIU turns huge pages off while
// it restores, but does so only for dumps that build on others (maybe_disable_thp in
// criu/mem.c, CRIU 4.2). So every dump is made one of these. Huge pages are as they
// were once the processes run.
func EmptyParent(pids []uint32) map[string][]byte {
	out := make(map[string][]byte, 2*len(pids))
	for _, pid := range pids {
		p := Pagemap{ID: uint64(pid), PagesID: pid}
		out[p.name()], out[p.File()] = p.encode(), nil
	}
	return out
}
