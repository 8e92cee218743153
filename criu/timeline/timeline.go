// SPDX-License-Identifier: Apache-2.0

// Package timeline reads out of CRIU's log of a restore what CRIU did when.
//
// Each line of a log begins with the time since the log was opened. A phase begins
// with the first line that is known to stand at its beginning and ends where the next
// one begins. Phases whose line is not there are left out, so that a CRIU that
// says something else, or less, gives a coarser picture and no wrong one.
package timeline

import (
	"bufio"
	"errors"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"
)

const (
	maxLine = 4 << 10  // bytes; what is longer is cut
	maxLog  = 64 << 20 // bytes; no more is read
	// maxParts bounds how many parts are found: CRIU restores as many mounts.
	maxParts = 1 << 12
	// minPart is how long a part takes at least to be one.
	minPart = 100 * time.Microsecond
)

// Phase is a part of a restore.
type Phase struct {
	Name       string
	Path       string        // of a mount: where, as the image says
	Start, End time.Duration // since the log was opened
	Parts      []Phase       // of it, in order: what took long by itself
}

// The phases in their order, and what the line says with which each begins (CRIU 4.1
// and 4.2, restore of one tree).
var phases = []struct{ name, begins string }{
	{"images", ""},                                         // options, kernel features, process tree
	{"fork", "Forking task with"},                          // the root task, in new namespaces
	{"namespaces", "Restoring namespaces"},                 // UTS and the like
	{"ipc", "Restoring IPC namespace"},                     // variables, segments, queues
	{"network", "Restoring IPC semaphores sets"},           //
	{"mounts", "mnt: Restoring mount namespace"},           //
	{"resources", "Preparing info about shared resources"}, // files, pipes, sockets
	{"memory", "Opened local page read"},                   // mappings, eager pages
	{"restorer", "Switched to the restorer"},               // final addresses, userfaultfd, threads
	{"post-restore", "Running post-restore scripts"},       // runc writes its state
	{"unlock", "net: Unlock network"},                      //
	{"resume", "was trapped"},                              // tasks are let go
	{"end", "Restore finished successfully"},               // they run
}

var (
	stamped = regexp.MustCompile(`^\(([0-9]+)\.([0-9]{6})\) +(?:pie: )?(?:[0-9]+: )?(.*)$`)
	mountAt = regexp.MustCompile(`^mnt: \tRead +([0-9]+) mp @ (.*)$`)
	mounts  = regexp.MustCompile(`^mnt(?:-v2)?: \tMounting ([a-z0-9_.-]+) @([0-9]+) `)
)

// Read returns the phases of a restore in their order, nothing for a log without
// any. The log is read in bounded memory.
func Read(log io.Reader) ([]Phase, error) {
	var p parser
	r := bufio.NewReaderSize(io.LimitReader(log, maxLog), maxLine)
	for {
		line, err := r.ReadSlice('\n')
		p.line(strings.TrimRight(string(line), "\n"))
		for errors.Is(err, bufio.ErrBufferFull) { // the rest of a long line
			_, err = r.ReadSlice('\n')
		}
		if errors.Is(err, io.EOF) {
			return p.end(), nil
		}
		if err != nil {
			return p.end(), err
		}
	}
}

type parser struct {
	out   []Phase
	next  int               // in phases
	last  time.Duration     // of the last line
	paths map[string]string // mount points by CRIU's number
	open  bool              // the last phase's last part has not ended
	parts int
}

func (p *parser) line(text string) {
	m := stamped.FindStringSubmatch(text)
	if m == nil {
		return
	}
	s, err := strconv.ParseUint(m[1], 10, 16)
	if err != nil {
		return
	}
	us, err := strconv.ParseUint(m[2], 10, 32)
	if err != nil {
		return
	}
	at := time.Duration(s)*time.Second + time.Duration(us)*time.Microsecond
	// Tasks write to one log: a line may be a little older than the one before.
	p.last = max(p.last, at)
	for i := max(p.next, 1); i < len(phases); i++ {
		if strings.Contains(m[3], phases[i].begins) {
			p.begin(i)
			break
		}
	}
	if p.next == 0 { // the first line, whatever it says
		p.begin(0)
	}
	p.mount(m[3])
}

func (p *parser) begin(i int) {
	p.close()
	p.out = append(p.out, Phase{Name: phases[i].name, Start: p.last})
	p.next = i + 1
}

// mount takes note of how long each mount takes: from the line that announces it to
// the next line, which CRIU writes when it is there with all its content.
func (p *parser) mount(text string) {
	if m := mountAt.FindStringSubmatch(text); m != nil && len(p.paths) < maxParts {
		if p.paths == nil {
			p.paths = make(map[string]string)
		}
		p.paths[m[1]] = m[2]
		return
	}
	p.closePart()
	if m := mounts.FindStringSubmatch(text); m != nil && len(p.out) > 0 && p.parts < maxParts {
		cur := &p.out[len(p.out)-1]
		cur.Parts = append(cur.Parts, Phase{Name: "mount " + m[1], Path: strings.ToValidUTF8(p.paths[m[2]], "?"), Start: p.last})
		p.open = true
		p.parts++
	}
}

func (p *parser) closePart() {
	if !p.open {
		return
	}
	p.open = false
	cur := &p.out[len(p.out)-1]
	last := &cur.Parts[len(cur.Parts)-1]
	if last.End = p.last; last.End-last.Start < minPart {
		cur.Parts = cur.Parts[:len(cur.Parts)-1]
		p.parts--
	}
}

// close ends the phase that is under way.
func (p *parser) close() {
	p.closePart()
	if len(p.out) > 0 {
		p.out[len(p.out)-1].End = p.last
	}
}

func (p *parser) end() []Phase {
	p.close()
	return p.out
}
