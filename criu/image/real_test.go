// SPDX-License-Identifier: Apache-2.0

package image

import (
	"slices"
	"testing"
)

// open opens one of the real dumps in testdata.
func open(t testing.TB, name string) *Dir {
	t.Helper()
	d, err := Open("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

const defaultCapabilities = 0xa80425fb // what containerd and Docker grant by default

func TestRealNginx(t *testing.T) {
	d := open(t, "nginx")
	for _, f := range d.Files() {
		if f.Kind != Message && f.Kind != Content {
			t.Errorf("%s is of kind %d", f.Name, f.Kind)
		}
	}
	inv, err := d.Inventory()
	if err != nil || inv.LSM != "none" || len(inv.Plugins) != 0 || inv.TCPClose {
		t.Errorf("%+v, %v", inv, err)
	}
	tasks, err := d.Tasks()
	if err != nil || len(tasks) != 3 {
		t.Fatalf("%d tasks, %v", len(tasks), err)
	}
	filters, err := d.Filters()
	if err != nil || len(filters) != 3 {
		t.Errorf("%d filters, %v", len(filters), err)
	}
	for i, task := range tasks {
		c := task.Threads[0].Creds
		uid, permitted := uint32(33), Capabilities(0)
		if i == 0 {
			uid, permitted = 0, defaultCapabilities
		}
		if task.Comm != "nginx" || task.State != Alive || c.UID != uid || c.Permitted != permitted || c.Bounding != defaultCapabilities || c.NoNewPrivs {
			t.Errorf("task %+v", task)
		}
		if mode, filter := task.SeccompOf(0, filters); mode != SeccompFilter || filter != uint32(i) {
			t.Errorf("task %d: seccomp %s %d", task.PID, mode, filter)
		}
		if task.IDs.PidNS == inv.Root.PidNS || task.IDs.UserNS != inv.Root.UserNS {
			t.Errorf("task %d: %+v", task.PID, task.IDs)
		}
		if fds, err := d.Descriptors(task.IDs.Files); err != nil || len(fds) < 4 {
			t.Errorf("task %d: %d descriptors, %v", task.PID, len(fds), err)
		}
	}
	if host, err := d.Hostname(tasks[0].IDs.UtsNS); err != nil || host != "pod-1" {
		t.Errorf("host name %q, %v", host, err)
	}
	if key, found, err := d.NetKey(tasks[0].IDs.NetNS); err != nil || !found || key != "extRootNetNS" {
		t.Errorf("network key %q, %v, %v", key, found, err)
	}
	maps, err := d.Pagemaps()
	if err != nil || len(maps) != 4 || !maps[3].Shared {
		t.Fatalf("%d pagemaps, %v", len(maps), err)
	}
	for _, p := range maps {
		if p.EagerSize()+p.LazySize() != p.Size || p.Complete() != nil || p.EagerSize() == 0 || p.Shared == (p.LazySize() > 0) {
			t.Errorf("pagemap %d: %d eager, %d lazy, %d in all", p.ID, p.EagerSize(), p.LazySize(), p.Size)
		}
	}
	mounts, err := d.ExternalMounts()
	if err != nil {
		t.Error(err)
	}
	var keys []string
	for _, m := range mounts {
		keys = append(keys, m.ExternalKey)
	}
	for _, want := range []string{"/etc/hosts", "/dev/shm", "/run/secrets/kubernetes.io/serviceaccount"} {
		if !slices.Contains(keys, want) {
			t.Errorf("no external mount %s in %v", want, keys)
		}
	}
	if slices.Contains(keys, MaskedFile) {
		t.Error("masked files are among the external mounts")
	}
	files, err := d.OpenFiles()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(files, func(f OpenFile) bool {
		return f.Inet != nil && f.Inet.State == 10 && f.Inet.Local.String() == "0.0.0.0:8080"
	}) {
		t.Error("no listening socket")
	}
}

// The second thread of a process is recorded without seccomp: restoring the
// first one's filter puts it under that, too.
func TestRealThreads(t *testing.T) {
	d := open(t, "threads")
	tasks, err := d.Tasks()
	if err != nil || len(tasks) != 1 || len(tasks[0].Threads) != 2 {
		t.Fatalf("%+v, %v", tasks, err)
	}
	filters, err := d.Filters()
	if err != nil {
		t.Fatal(err)
	}
	if tasks[0].Threads[1].Seccomp != SeccompDisabled {
		t.Error("the images record the second thread's seccomp")
	}
	if mode, _ := tasks[0].SeccompOf(1, filters); mode != SeccompFilter {
		t.Errorf("the second thread would be restored with seccomp %s", mode)
	}
	ghosts, err := d.Ghosts()
	if err != nil || len(ghosts) != 1 || ghosts[0].Mode != 0o100644 {
		t.Errorf("%+v, %v", ghosts, err)
	}
	files, err := d.OpenFiles()
	if err != nil {
		t.Fatal(err)
	}
	pairs := 0
	for _, f := range files {
		if f.Unix != nil && f.Unix.Peer != 0 {
			pairs++
		}
	}
	if pairs != 2 {
		t.Errorf("%d ends of a socket pair", pairs)
	}
	if paths, err := d.CgroupPaths(); err != nil || len(paths) == 0 {
		t.Errorf("%v, %v", paths, err)
	}
}
