// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

var writeCorpus = flag.Bool("corpus", false, "write what the tricks make into the corpora of the fuzz targets that read it")

// readers are the fuzz targets that read a file of CRIU's, and where.
var readers = map[string]string{
	"inventory.img": "criu/image/FuzzInventory", "pstree.img": "criu/image/FuzzPstree", "core-1.img": "criu/image/FuzzCore", "ids-1.img": "criu/image/FuzzIDs",
	"mm-1.img": "criu/image/FuzzMemory", "fs-1.img": "criu/image/FuzzFS", "seccomp.img": "criu/image/FuzzSeccomp", "files.img": "criu/image/FuzzFiles",
	"ghost-file-1.img": "criu/image/FuzzGhost", "cgroup.img": "criu/image/FuzzCgroup", "remap-fpath.img": "criu/image/FuzzRemaps", "fdinfo-2.img": "criu/image/FuzzDescriptors",
	"netns-10.img": "criu/image/FuzzNamespaces", "descriptors.json": "criu/image/FuzzStandard", "pagemap-1.img": "criu/image/FuzzEager",
}

// most is how long an input of a corpus is, in bytes.
const most = 2500

// TestCorpus: the fuzz targets know what the tricks make.
func TestCorpus(t *testing.T) {
	source := newNode(t).publish()
	inputs := 0
	for _, trick := range Tricks() {
		i, err := source.Image()
		if err != nil {
			t.Fatal(err)
		}
		trick.Make(i)
		if i.PageIndex != nil && trick.Name != "index-other-than-its-digest" {
			inputs += input(t, "snapshotter/pageindex/FuzzParse", trick.Name, i.PageIndex(bytes.Clone(source.pageIndex)))
		}
		for _, e := range i.State {
			target, ok := readers[e.Name]
			same := slices.ContainsFunc(source.state, func(o Entry) bool { return o.Name == e.Name && bytes.Equal(o.Content, e.Content) })
			if ok && !same && trick.Pod == nil {
				inputs += input(t, target, trick.Name, e.Content)
			}
		}
	}
	if inputs < 100 {
		t.Errorf("%d inputs: run this test with -corpus", inputs)
	}
}

// input looks for a trick's input in a corpus, or writes it there. It returns the number of inputs found.
func input(t *testing.T, target, name string, content []byte) int {
	t.Helper()
	if len(content) > most {
		return 0
	}
	path := filepath.Join("../..", filepath.Dir(target), "testdata/fuzz", filepath.Base(target), name)
	if *writeCorpus {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, fmt.Appendf(nil, "go test fuzz v1\n[]byte(%q)\n", content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Not its content: that changes with compressors and encoders.
	if _, err := os.Stat(path); err != nil {
		t.Logf("a trick has no input (run this test with -corpus): %v", err)
		return 0
	}
	return 1
}
