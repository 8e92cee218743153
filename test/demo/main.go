// SPDX-License-Identifier: Apache-2.0

//go:build linux

// demo shows on this machine what thaw is for: a Python agent that takes seconds to warm up is checkpointed while it serves,
// deleted, and restored in a new pod from the registry, eagerly (as without thaw) and lazily. It checks every reply and
// fails if one is wrong.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// timeout bounds the whole demo; on two cores it takes about a minute.
const timeout = 10 * time.Minute

// questions are asked in this order; the first one is asked of each restored agent too, whose answer must be the same.
var questions = []string{"kakakaka kakakaro", "kakakami kakakaten", "kakakalu", "kakakasa kakakavor kakakane"}

func main() {
	stack.Isolate()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := demo(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo: FAILED:", err)
		os.Exit(1)
	}
}

// reply is what the agent answers.
type reply struct {
	Session  int    `json:"session"`
	Answer   []any  `json:"answer"`
	Checksum string `json:"checksum"`
}

// measured is a line of the table.
type measured struct {
	what    string
	first   time.Duration // from the request to start to the first correct reply
	fetched int64         // bytes from the registry in that time
}

func demo(ctx context.Context) (err error) {
	step("a registry, containerd and thaw's daemon, in namespaces of their own")
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stdout})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := s.PushWorkloads(ctx, workloads.Agent); err != nil {
		return err
	}

	d := &demonstration{stack: s, image: s.Registry.Ref("checkpoints/agent:warm")}
	cold, err := d.coldStart(ctx)
	if err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	eager, err := d.eagerRestore(ctx)
	if err != nil {
		return fmt.Errorf("eager restore: %w", err)
	}
	lazy, err := d.lazyRestore(ctx)
	if err != nil {
		return fmt.Errorf("lazy restore: %w", err)
	}

	fmt.Println()
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "\ttime to first correct reply\tfetched by then\tmemory\t")
	for _, m := range []measured{cold, eager, lazy} {
		fmt.Fprintf(t, "%s\t%.2f s\t%.1f MiB\t%.0f MiB\t\n", m.what, m.first.Seconds(), mib(m.fetched), mib(d.memory))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Printf("\nEvery reply was right. Lazy restore replied %.1f times sooner than eager restore, %.1f times sooner than a cold start.\n",
		eager.first.Seconds()/lazy.first.Seconds(), cold.first.Seconds()/lazy.first.Seconds())
	fmt.Println("Root filesystems were pulled before each measurement; thaw's and containerd's caches were empty of the checkpoint.")
	return nil
}

// demonstration is what the steps hand on.
type demonstration struct {
	stack *stack.Stack
	image string // the checkpoint image

	memory   int64  // resident bytes of the warm agent
	asked    int    // questions before the checkpoint
	answer   []any  // to the first question
	checksum string // over all that the agent warmed up
	ip, id   string // of the pod and the container that were checkpointed
}

// coldStart starts the agent as usual, asks it, makes the checkpoint, and deletes everything of it on the node.
func (d *demonstration) coldStart(ctx context.Context) (m measured, err error) {
	step("cold start of the Python agent")
	s := d.stack
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "agent", Handler: "thaw"})
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, removePod(ctx, pod)) }()
	c, err := pod.Create(ctx, stack.ContainerOptions{Image: s.Workload(workloads.Agent)})
	if err != nil {
		return m, err
	}
	m.what = "cold start"
	before := s.Registry.Traffic(nil)
	began := time.Now()
	if err := c.Start(ctx); err != nil {
		return m, err
	}
	first, err := d.ask(ctx, pod, 0)
	if err != nil {
		return m, err
	}
	m.first, m.fetched = time.Since(began), s.Registry.Traffic(nil).Sent-before.Sent
	if first.Session != 1 || len(first.Answer) == 0 {
		return m, fmt.Errorf("wrong first reply %+v", first)
	}
	d.answer, d.ip, d.id = first.Answer, pod.IP, c.ID
	d.asked = len(questions)
	for i := 1; i < d.asked; i++ {
		r, err := d.ask(ctx, pod, i)
		if err != nil {
			return m, err
		}
		if r.Session != i+1 {
			return m, fmt.Errorf("question %d was counted as %d", i+1, r.Session)
		}
	}
	if d.checksum, err = d.sum(ctx, pod); err != nil {
		return m, err
	}
	if d.memory, err = resident(ctx, c); err != nil {
		return m, err
	}
	fmt.Printf("container %.12s at %s replied after %.2f s; %d questions asked, %.0f MiB resident\n",
		c.ID, pod.IP, m.first.Seconds(), d.asked, mib(d.memory))

	step("thaw checkpoint %.12s --push %s", c.ID, d.image)
	uploaded := s.Registry.Traffic(nil).Received
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), "checkpoint", c.ID, "--push", d.image)
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return m, fmt.Errorf("thaw checkpoint: %w", err)
	}
	fmt.Printf("uploaded %.1f MiB\n", mib(s.Registry.Traffic(nil).Received-uploaded))
	return m, nil
}

// forget deletes all images and caches of the node, then pulls what any restore needs: the root filesystem.
func (d *demonstration) forget(ctx context.Context) error {
	if err := d.stack.PruneImages(ctx); err != nil {
		return err
	}
	if err := d.stack.ClearThawCache(ctx); err != nil {
		return err
	}
	return d.stack.EnsureImage(ctx, d.image, nil)
}

// eagerRestore does what is done without thaw: all is downloaded and unpacked before runc restore begins.
func (d *demonstration) eagerRestore(ctx context.Context) (m measured, err error) {
	step("eager restore of the same checkpoint: download all, unpack, runc restore")
	if err := d.forget(ctx); err != nil {
		return m, err
	}
	b, err := baseline.New(ctx, d.stack, d.image, nil)
	if err != nil {
		return m, err
	}
	defer func() {
		ctx, cancel := afterwards(ctx)
		defer cancel()
		err = errors.Join(err, b.Remove(ctx))
	}()
	return d.measure(ctx, "eager restore", b.Pod, func() error {
		if err := baseline.Unpack(ctx, d.image, b.Images()); err != nil {
			return err
		}
		return b.Restore(ctx, false)
	})
}

// lazyRestore runs the checkpoint image in an ordinary pod of the handler thaw.
func (d *demonstration) lazyRestore(ctx context.Context) (m measured, err error) {
	step("lazy restore: a new pod of the handler thaw, empty caches")
	if err := d.forget(ctx); err != nil {
		return m, err
	}
	pod, err := d.stack.RunPod(ctx, stack.PodOptions{Name: "agent", Handler: "thaw"})
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, removePod(ctx, pod)) }()
	c, err := pod.Create(ctx, stack.ContainerOptions{Image: d.image})
	if err != nil {
		return m, err
	}
	if m, err = d.measure(ctx, "lazy restore", pod, func() error { return c.Start(ctx) }); err != nil {
		return m, err
	}
	if pod.IP == d.ip || c.ID == d.id {
		return m, fmt.Errorf("container %.12s at %s is not a new one", c.ID, pod.IP)
	}
	fmt.Printf("container %.12s (was %.12s) at %s (was %s)\n", c.ID, d.id, pod.IP, d.ip)
	return m, nil
}

// measure restores and times the first reply, which must go on where the checkpoint was made; then it has the agent read all of
// its memory, which must be what it was.
func (d *demonstration) measure(ctx context.Context, what string, pod *stack.Pod, restore func() error) (measured, error) {
	m := measured{what: what}
	before := d.stack.Registry.Traffic(nil)
	began := time.Now()
	if err := restore(); err != nil {
		return m, err
	}
	r, err := d.ask(ctx, pod, 0)
	if err != nil {
		return m, err
	}
	m.first, m.fetched = time.Since(began), d.stack.Registry.Traffic(nil).Sent-before.Sent
	if r.Session != d.asked+1 || !reflect.DeepEqual(r.Answer, d.answer) {
		return m, fmt.Errorf("wrong reply: session %d and answer %v, not %d and %v", r.Session, r.Answer, d.asked+1, d.answer)
	}
	fmt.Printf("replied after %.2f s with %.1f MiB fetched; the session goes on with question %d\n", m.first.Seconds(), mib(m.fetched), r.Session)
	sum, err := d.sum(ctx, pod)
	if err != nil {
		return m, err
	}
	if sum != d.checksum {
		return m, fmt.Errorf("wrong memory: checksum %s, it was %s", sum, d.checksum)
	}
	fmt.Printf("checksum over all that was warmed up: %s, as before\n", sum)
	return m, nil
}

func (d *demonstration) ask(ctx context.Context, pod *stack.Pod, question int) (reply, error) {
	return request(ctx, pod, "/ask?q="+url.QueryEscape(questions[question]))
}

func (d *demonstration) sum(ctx context.Context, pod *stack.Pod) (string, error) {
	r, err := request(ctx, pod, "/checksum")
	return r.Checksum, err
}

func request(ctx context.Context, pod *stack.Pod, path string) (reply, error) {
	var r reply
	body, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080"+path)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, fmt.Errorf("reply %q: %w", body, err)
	}
	return r, nil
}

// resident is how much memory the container's first process has in use, in bytes.
func resident(ctx context.Context, c *stack.Container) (int64, error) {
	pid, err := c.PID(ctx)
	if err != nil {
		return 0, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, errors.New("no VmRSS in the process's status")
}

// afterwards is a context for tidying up, also when the demo was interrupted.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
}

func removePod(ctx context.Context, pod *stack.Pod) error {
	ctx, cancel := afterwards(ctx)
	defer cancel()
	return pod.Remove(ctx)
}

func step(format string, args ...any) { fmt.Printf("\n==> "+format+"\n", args...) }

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
