// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// samplePause is between two looks at all processes.
const samplePause = 100 * time.Microsecond

// ordinary waits are those for other processes that are looked at too, and for the next piece of work.
var ordinary = []string{
	"0", "", "do_wait", "futex_do_wait", "do_epoll_wait", "ep_poll", "anon_pipe_read", "pipe_read", "__skb_wait_for_more_packets",
	"hrtimer_nanosleep", "handle_userfault", "ptrace_stop", "do_sigtimedwait", "kernel_clone", "unix_stream_data_wait",
}

// waits samples in which kernel functions the processes of restores wait, by /proc/PID/wchan.
type waits struct {
	took map[string]time.Duration // by command and function
	stop chan struct{}
	done chan struct{}
}

// begin begins to look at processes that are started from now on.
func (w *waits) begin() error {
	if w.took == nil {
		w.took = make(map[string]time.Duration)
	}
	before := make(map[string]bool)
	list, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	for _, p := range list {
		before[p] = true
	}
	w.stop, w.done = make(chan struct{}), make(chan struct{})
	go w.sample(before)
	return nil
}

// end ends it.
func (w *waits) end() {
	close(w.stop)
	<-w.done
}

func (w *waits) sample(before map[string]bool) {
	defer close(w.done)
	t := time.NewTicker(samplePause)
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case <-w.stop:
			return
		case now := <-t.C:
			w.look(before, now.Sub(last))
			last = now
		}
	}
}

// look adds the time since the last look to what each process waits in.
func (w *waits) look(before map[string]bool, since time.Duration) {
	dir, err := os.Open("/proc")
	if err != nil {
		return
	}
	names, _ := dir.Readdirnames(-1)
	dir.Close()
	for _, name := range names {
		path := "/proc/" + name
		if _, err := strconv.Atoi(name); err != nil || before[path] {
			continue
		}
		function, err := os.ReadFile(path + "/wchan")
		if err != nil || slices.Contains(ordinary, string(function)) {
			continue
		}
		command, err := os.ReadFile(path + "/comm")
		if err != nil {
			continue
		}
		w.took[strings.TrimSpace(string(command))+" | "+string(function)] += since
	}
}

// print prints what took half a millisecond or more, a restore.
func (w *waits) print(out io.Writer, restores int) {
	fmt.Fprintf(out, "\nWaits in the kernel, means of %d restores, sampled:\n\n| command | function | took |\n| --- | --- | ---: |\n", restores)
	keys := slices.SortedFunc(maps.Keys(w.took), func(a, b string) int { return cmp.Compare(w.took[b], w.took[a]) })
	for _, k := range keys {
		if took := w.took[k] / time.Duration(restores); took >= 500*time.Microsecond {
			fmt.Fprintf(out, "| %s | %s |\n", k, ms(took))
		}
	}
}
