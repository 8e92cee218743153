// SPDX-License-Identifier: Apache-2.0

package timeline

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// log is what CRIU 4.2.1 wrote, shortened.
const log = `(00.000000) CRIU run id = 799e729d-0861-40b1-87d5-ecf47aca2f16
(00.000016) Version: 4.2.1 (gitid 0)
(00.002565) mnt: 	Read 139 mp @ /dev
(00.002631) mnt: 	Read 136 mp @ /
(00.002758) Forking task with 1 pid (flags 0x6c028000)
(00.005200)      1: Restoring namespaces 1 flags 0x6c028000
(00.006399)      1: Restoring IPC namespace
(00.022121)      1: Restoring IPC semaphores sets
(00.023089)      1: mnt: Restoring mount namespace
(00.023596)      1: mnt-v2: 	Mounting overlay @136 (0)
(00.023623)      1: mnt-v2: Create plain mountpoint /tmp/.criu.mntns.6MHReG/mnt-0000000136 for 136
(00.028434)      1: mnt-v2: 	Mounting tmpfs @139 (0)
(00.050008)      1: mnt-v2: Create plain mountpoint /tmp/.criu.mntns.6MHReG/mnt-0000000139 for 139
(00.059299)      1: Preparing info about shared resources
(00.060096)      1: Opened local page read 1 (parent 0)
task_args->pid: 1
(00.061743) pie: 1: Switched to the restorer 1
(00.062987) Running post-restore scripts
(00.062554) pie: 1: 1: Restored
(00.065872) net: Unlock network
(00.066392) 1427 was trapped
(00.066411) 1412 was trapped
(00.067096) Restore finished successfully. Tasks resumed.
(00.067120) Running post-resume scripts
`

func TestRead(t *testing.T) {
	phases, err := Read(strings.NewReader(log))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	var end time.Duration
	for _, p := range phases {
		names = append(names, p.Name)
		if p.Start != end || p.End < p.Start {
			t.Errorf("%s from %v to %v, the one before ends at %v", p.Name, p.Start, p.End, end)
		}
		end = p.End
	}
	want := "images fork namespaces ipc network mounts resources memory restorer post-restore unlock resume end"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("%s", got)
	}
	if end != 67120*time.Microsecond {
		t.Errorf("it ends at %v", end)
	}
	dev := Phase{Name: "mount tmpfs", Path: "/dev", Start: 28434 * time.Microsecond, End: 50008 * time.Microsecond}
	if m := phases[5]; !reflect.DeepEqual(m.Parts, []Phase{dev}) {
		t.Errorf("parts of the mounts: %+v", m.Parts)
	}
}

// TestReadOthers: what is not known makes the picture coarser and nothing else.
func TestReadOthers(t *testing.T) {
	for name, c := range map[string]struct {
		log  string
		want []Phase
	}{
		"empty":        {"", nil},
		"no stamps":    {"Error: no\n\x00\xff(1.2) x\n(99999999999999999999.000000) CRIU run id\n", nil},
		"long line":    {"(00.000001) CRIU run id = " + strings.Repeat("x", 10*maxLine) + "\n(00.000005) Forking task with\n(00.000007) end", []Phase{{Name: "images", Start: 1000, End: 5000}, {Name: "fork", Start: 5000, End: 7000}}},
		"phases lack":  {"(00.000001) CRIU run id\n(00.000005) net: Unlock network\n(00.000009) x\n", []Phase{{Name: "images", Start: 1000, End: 5000}, {Name: "unlock", Start: 5000, End: 9000}}},
		"wrong order":  {"(00.000001) net: Unlock network\n(00.000005) CRIU run id\n", []Phase{{Name: "unlock", Start: 1000, End: 5000}}},
		"no such path": {"(00.000001) mnt: Restoring mount namespace\n(00.000001) mnt-v2: \tMounting tmpfs @7 (0)\n(00.001000) x", []Phase{{Name: "mounts", Start: 1000, End: 1000000, Parts: []Phase{{Name: "mount tmpfs", Start: 1000, End: 1000000}}}}},
		"not UTF-8":    {"(00.000001) mnt: \tRead 7 mp @ /\xff\n(00.000001) mnt: Restoring mount namespace\n(00.000001) mnt-v2: \tMounting tmpfs @7 (0)\n(00.001000) x", []Phase{{Name: "images", Start: 1000, End: 1000}, {Name: "mounts", Start: 1000, End: 1000000, Parts: []Phase{{Name: "mount tmpfs", Path: "/?", Start: 1000, End: 1000000}}}}},
	} {
		got, err := Read(strings.NewReader(c.log))
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(log)
	f.Fuzz(func(t *testing.T, text string) {
		phases, err := Read(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		var last time.Duration
		for _, p := range phases {
			if p.Start < last || p.End < p.Start {
				t.Errorf("%+v", phases)
			}
			for _, part := range p.Parts {
				if part.Start < p.Start || part.End > p.End || part.End-part.Start < minPart {
					t.Errorf("%+v in %+v", part, p)
				}
			}
			last = p.End
		}
	})
}
