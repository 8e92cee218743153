// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// fuzz feeds content to a file of a directory of otherwise real images. Whatever
// it is, reading ends without a panic, and an error says that the images are at
// fault.
func fuzz(f *testing.F, name string, read func(d *Dir) error) {
	for _, dump := range []string{"nginx", "threads"} {
		if seed, err := os.ReadFile(filepath.Join("testdata", dump, name)); err == nil {
			f.Add(seed)
		}
	}
	path := f.TempDir()
	if err := os.CopyFS(path, os.DirFS("testdata/nginx")); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(filepath.Join(path, name), in, 0o600); err != nil {
			t.Fatal(err)
		}
		d, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if err := read(d); err != nil && !errors.Is(err, ErrFormat) && !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("error %v is not ErrFormat", err)
		}
	})
}

func tasks(d *Dir) error {
	all, err := d.Tasks()
	if err != nil {
		return err
	}
	filters, err := d.Filters()
	if err != nil {
		return err
	}
	for i := range all {
		for j := range all[i].Threads {
			all[i].SeccompOf(j, filters)
		}
	}
	return nil
}

func second[T any](read func(d *Dir) (T, error)) func(d *Dir) error {
	return func(d *Dir) error {
		_, err := read(d)
		return err
	}
}

func FuzzInventory(f *testing.F) { fuzz(f, "inventory.img", second((*Dir).Inventory)) }
func FuzzPstree(f *testing.F)    { fuzz(f, "pstree.img", tasks) }
func FuzzCore(f *testing.F)      { fuzz(f, "core-1.img", tasks) }
func FuzzIDs(f *testing.F)       { fuzz(f, "ids-1.img", tasks) }
func FuzzMemory(f *testing.F)    { fuzz(f, "mm-1.img", tasks) }
func FuzzFS(f *testing.F)        { fuzz(f, "fs-1.img", tasks) }
func FuzzSeccomp(f *testing.F)   { fuzz(f, "seccomp.img", tasks) }
func FuzzMounts(f *testing.F)    { fuzz(f, "mountpoints-13.img", second((*Dir).Mounts)) }
func FuzzFiles(f *testing.F)     { fuzz(f, "files.img", second((*Dir).OpenFiles)) }
func FuzzGhost(f *testing.F)     { fuzz(f, "ghost-file-1.img", second((*Dir).Ghosts)) }
func FuzzCgroup(f *testing.F)    { fuzz(f, "cgroup.img", second((*Dir).CgroupPaths)) }
func FuzzCPU(f *testing.F)       { fuzz(f, "cpuinfo.img", second((*Dir).CPUFeatures)) }
func FuzzRemaps(f *testing.F)    { fuzz(f, "remap-fpath.img", second((*Dir).Remaps)) }

// FuzzStandard reads runc's list.
func FuzzStandard(f *testing.F) {
	f.Add([]byte(`["/dev/null","pipe:[1]","pipe:[2]"]`))
	fuzz(f, "descriptors.json", second((*Dir).StandardDescriptors))
}

// FuzzTmpfs changes mounts as for a restore.
func FuzzTmpfs(f *testing.F) {
	fuzz(f, "mountpoints-13.img", func(d *Dir) error {
		list, err := d.Tmpfs()
		if err != nil {
			return err
		}
		keys := make(map[uint32]string)
		for _, t := range list {
			keys[t.Device] = "key"
		}
		_, err = d.GiveMounts(keys)
		return err
	})
}

// FuzzSkipNetworkLock changes the inventory as for a restore.
func FuzzSkipNetworkLock(f *testing.F) { fuzz(f, "inventory.img", second((*Dir).SkipNetworkLock)) }

func FuzzDescriptors(f *testing.F) {
	fuzz(f, "fdinfo-2.img", func(d *Dir) error {
		_, err := d.Descriptors(2)
		return err
	})
}

func FuzzNamespaces(f *testing.F) {
	fuzz(f, "netns-10.img", func(d *Dir) error {
		_, _, err := d.NetKey(10)
		return err
	})
}

func FuzzHostname(f *testing.F) {
	fuzz(f, "utsns-12.img", func(d *Dir) error {
		_, err := d.Hostname(12)
		return err
	})
}

// FuzzEager marks pages as eager as for a dump.
func FuzzEager(f *testing.F) {
	fuzz(f, "pagemap-1.img", func(d *Dir) error {
		maps, err := d.Pagemaps()
		if err != nil {
			return err
		}
		all, err := d.Tasks()
		if err != nil {
			return err
		}
		MakeEager(all, maps)
		return nil
	})
}

func FuzzKind(f *testing.F) {
	f.Add("core-1.img")
	f.Add("tmpfs-dev-62.tar.gz.img")
	f.Fuzz(func(t *testing.T, name string) { KindOf(name) })
}
