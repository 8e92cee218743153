// SPDX-License-Identifier: Apache-2.0

package image

import (
	"maps"
	"os"
	"path/filepath"
	"testing"

	criu_core "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"google.golang.org/protobuf/proto"
)

// CRIU gives a zombie one thread with an arbitrary number (criu/seize.c does not set
// it, 4.1 and 4.2).
func TestZombie(t *testing.T) {
	files := make(map[string][]byte)
	names, err := filepath.Glob("testdata/threads/*.img")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		content, err := os.ReadFile(n)
		if err != nil {
			t.Fatal(err)
		}
		files[filepath.Base(n)] = content
	}
	for _, tid := range []uint32{0, 1, 3996770032} {
		files := maps.Clone(files)
		zombie := encode(t, magicPstree, &pstree.PstreeEntry{
			Pid: proto.Uint32(20), Ppid: proto.Uint32(1), Pgid: proto.Uint32(1), Sid: proto.Uint32(1), Threads: []uint32{tid},
		})
		files["pstree.img"] = append(files["pstree.img"][:len(files["pstree.img"]):len(files["pstree.img"])], zombie[8:]...)
		files["core-20.img"] = encode(t, magicCore, &criu_core.CoreEntry{
			Mtype: criu_core.CoreEntry_X86_64.Enum(),
			Tc: &criu_core.TaskCoreEntry{
				TaskState: proto.Uint32(uint32(Zombie)), ExitCode: proto.Uint32(256), Personality: proto.Uint32(0), Flags: proto.Uint32(0),
				BlkSigset: proto.Uint64(0), Comm: proto.String("gone"),
			},
		})
		tasks, err := dir(t, files).Tasks()
		if err != nil {
			t.Fatalf("thread %d: %v", tid, err)
		}
		if z := tasks[len(tasks)-1]; z.PID != 20 || !z.State.Gone() || len(z.Threads) != 0 {
			t.Errorf("%+v", z)
		}
	}
}
