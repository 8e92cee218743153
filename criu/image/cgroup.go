// SPDX-License-Identifier: Apache-2.0

package image

import (
	pb "github.com/checkpoint-restore/go-criu/v7/crit/images/cgroup"
)

// CgroupPaths returns all paths of control groups in cgroup.img: those that tasks
// were in, and the directories that CRIU would make.
func (d *Dir) CgroupPaths() ([]string, error) {
	e := &pb.CgroupEntry{}
	if _, err := d.one("cgroup.img", magicCgroup, e); err != nil {
		return nil, err
	}
	var out []string
	for _, s := range e.GetSets() {
		for _, c := range s.GetCtls() {
			out = append(out, c.GetPath())
		}
	}
	// The decoder bounds how deeply messages may be nested.
	var walk func(dirs []*pb.CgroupDirEntry)
	walk = func(dirs []*pb.CgroupDirEntry) {
		for _, dir := range dirs {
			out = append(out, dir.GetDirName())
			walk(dir.GetChildren())
		}
	}
	for _, c := range e.GetControllers() {
		walk(c.GetDirs())
	}
	return out, nil
}
