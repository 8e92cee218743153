// SPDX-License-Identifier: Apache-2.0

//go:build linux

package torture

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/isolate"
)

var (
	seeds    = flag.Int("seeds", 32, "fresh seeds")
	first    = flag.Uint64("first", 0, "the first seed; 0: a random one")
	repeat   = flag.Int("repeat", 1, "runs of each seed")
	restores = flag.Int("restores", 40, "restores of TestRepeat")
	par      = flag.Int("runs", runtime.NumCPU(), "runs at a time")
	limit    = flag.Duration("limit", 90*time.Second, "time limit of a run, or of each hundred restores of TestRepeat")
	inner    = flag.String("inner", "", "for the test itself: what to run in a PID namespace of its own")
)

func TestMain(m *testing.M) {
	flag.Parse()
	isolate.Enter()
	if *inner != "" {
		os.Exit(runInner(*inner))
	}
	os.Exit(m.Run())
}

// built is the compiled programs and what else a run needs.
type built struct{ torture, crowd, criu, root string }

var build = sync.OnceValues(func() (*built, error) {
	root, err := stack.Root()
	if err != nil {
		return nil, err
	}
	b := &built{root: root, criu: filepath.Join(root, "build", "bin", "criu")}
	if _, err := os.Stat(b.criu); err != nil {
		return nil, fmt.Errorf("%s is missing: run make deps", b.criu)
	}
	// Private, and gone at the end.
	b.torture, b.crowd = "/run/torture-program", "/run/crowd-program"
	for from, to := range map[string]string{"torture.c": b.torture, "crowd.c": b.crowd} {
		out, err := exec.Command("gcc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", to,
			filepath.Join(root, "test", "torture", "program", from)).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("compile %s: %w\n%s", from, err, out)
		}
	}
	return b, nil
})

// isolated runs a part of the test as the first process of a PID namespace. What
// it printed is the error if it fails.
func isolated(ctx context.Context, b *built, part, dir string) (string, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-inner", part, "-limit", limit.String(), "-restores", strconv.Itoa(*restores))
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TORTURE_CRIU="+b.criu, "TORTURE_PROGRAM="+b.torture, "TORTURE_CROWD="+b.crowd)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	text := strings.TrimSpace(out.String())
	if err != nil {
		return text, fmt.Errorf("%w: %s", err, text)
	}
	return text, nil
}

// statusCRIU is the exit status for errCRIU.
const statusCRIU = 3

// runInner is what isolated runs.
func runInner(part string) int {
	err := enterPIDs()
	if err == nil {
		kind, arg, _ := strings.Cut(part, "=")
		most := *limit
		if kind == "repeat" {
			most *= time.Duration(1 + *restores/100)
		}
		ctx, cancel := context.WithTimeout(context.Background(), most)
		defer cancel()
		switch kind {
		case "seed":
			err = runSeed(ctx, arg)
		case "crowd":
			err = runCrowd(ctx, arg)
		case "repeat":
			err = runRepeat(ctx, arg)
		default:
			err = fmt.Errorf("unknown part %q", part)
		}
	}
	if err != nil {
		fmt.Println(err)
		if errors.Is(err, errCRIU) {
			return statusCRIU
		}
		return 1
	}
	return 0
}

// newRun starts a program and dumps it. The current folder is the run's.
func newRun(ctx context.Context, running bool, program ...string) (*run, *checkpoint, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, nil, err
	}
	r := &run{criu: os.Getenv("TORTURE_CRIU"), dir: dir, program: program, running: running}
	if err := r.start(ctx); err != nil {
		return nil, nil, fmt.Errorf("before the dump: %w", err)
	}
	if err := r.dump(ctx); err != nil {
		return nil, nil, err
	}
	c, err := makeCheckpoint(ctx, r.images())
	return r, c, err
}

// mix is the function of the same name in the program.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

// plan is what a seed says about the restore.
func plan(seed uint64) options {
	rnd := mathrand.New(mathrand.NewPCG(seed, 1))
	pick := func(n int) int { return rnd.IntN(n) }
	return options{
		policy:  []pager.Policy{pager.Lazy, pager.Lazy, pager.Cached, pager.Complete}[pick(4)],
		present: []float64{0, 0, 0.5, 0.9, 1}[pick(5)],
		latency: []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond}[pick(4)],
		failing: []float64{0, 0.1}[pick(2)],
		fill:    pick(6) == 0,
		// Drawn last: seeds that were kept are to stay what they were.
		expected: []float64{0, 0.5, 1}[pick(3)],
	}
}

func runSeed(ctx context.Context, arg string) error {
	seed, err := strconv.ParseUint(arg, 10, 64)
	if err != nil {
		return err
	}
	rnd := mathrand.New(mathrand.NewPCG(seed, 2))
	r, c, err := newRun(ctx, mix(seed)>>8&1 == 1, os.Getenv("TORTURE_PROGRAM"),
		arg, strconv.Itoa(rnd.IntN(400)), strconv.Itoa(50+rnd.IntN(600)))
	if err != nil {
		return err
	}
	o := plan(seed)
	if err := r.restore(ctx, c, o); err != nil {
		return fmt.Errorf("%w\n%+v\n%+v", err, o, r.result)
	}
	fmt.Printf("%+v", r.result)
	return nil
}

// runPart runs a part in a folder of its own and keeps that if it fails.
func runPart(ctx context.Context, b *built, part string) (string, error) {
	dir, err := os.MkdirTemp("/run", "torture-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	out, err := isolated(ctx, b, part, dir)
	if err != nil {
		kept := filepath.Join(b.root, "build", "torture", part)
		kerr := errors.Join(os.RemoveAll(kept), os.MkdirAll(filepath.Dir(kept), 0o755), os.CopyFS(kept, os.DirFS(dir)))
		if kerr != nil {
			err = fmt.Errorf("%w (its folder could not be kept: %w)", err, kerr)
		}
	}
	return out, err
}

// runSeeds runs seeds in parallel and reports the failed ones.
func runSeeds(t *testing.T, list []uint64) {
	b, err := build()
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var failed, refused []string
	var wg sync.WaitGroup
	next := make(chan uint64)
	done := 0
	for range max(1, *par) {
		wg.Go(func() {
			for seed := range next {
				out, err := runPart(t.Context(), b, fmt.Sprint("seed=", seed))
				mu.Lock()
				done++
				var exit *exec.ExitError
				switch {
				case errors.As(err, &exit) && exit.ExitCode() == statusCRIU:
					refused = append(refused, fmt.Sprint(seed))
					t.Logf("seed %d: %v", seed, err)
				case err != nil:
					failed = append(failed, fmt.Sprint(seed))
					t.Errorf("seed %d: %v", seed, err)
				case testing.Verbose():
					t.Logf("%d/%d seed %d: %s", done, len(list), seed, out)
				}
				mu.Unlock()
			}
		})
	}
	for _, s := range list {
		next <- s
	}
	close(next)
	wg.Wait()
	t.Logf("%d runs, %d failed %v, %d given up by CRIU %v", done, len(failed), failed, len(refused), refused)
	if len(refused)*4 > len(list)+8 {
		t.Errorf("CRIU gave too many up")
	}
}

// TestFresh runs seeds that nobody has run before.
func TestFresh(t *testing.T) {
	start := freshSeed()
	var list []uint64
	for i := range *seeds {
		for range *repeat {
			list = append(list, start+uint64(i))
		}
	}
	t.Logf("seeds %d to %d", start, start+uint64(*seeds)-1)
	runSeeds(t, list)
}

// TestHugePages runs fresh seeds while all memory may be made of huge pages.
func TestHugePages(t *testing.T) {
	const file = "/sys/kernel/mm/transparent_hugepage/enabled"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Skipf("no huge pages here: %v", err)
	}
	_, was, _ := strings.Cut(string(text), "[")
	was, _, _ = strings.Cut(was, "]")
	if err := os.WriteFile(file, []byte("always"), 0); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(file, []byte(was), 0); err != nil {
			t.Error(err)
		}
	})
	start := freshSeed()
	t.Logf("seeds %d to %d", start, start+uint64(*seeds/4))
	list := []uint64{712576574, 712576574, 712576574} // failed once
	for i := range *seeds/4 + 1 {
		list = append(list, start+uint64(i))
	}
	runSeeds(t, list)
}

// freshSeed is the seed to begin with.
func freshSeed() uint64 {
	if *first != 0 {
		return *first
	}
	var b [4]byte
	rand.Read(b[:])
	return uint64(binary.NativeEndian.Uint32(b[:]))
}

// TestKept runs the seeds that failed once.
func TestKept(t *testing.T) {
	files, err := filepath.Glob("testdata/seeds/*")
	if err != nil {
		t.Fatal(err)
	}
	var list []uint64
	for _, f := range files {
		seed, err := strconv.ParseUint(filepath.Base(f), 10, 64)
		if err != nil {
			t.Fatalf("%s is not named by a seed", f)
		}
		list = append(list, seed)
	}
	runSeeds(t, list)
}

// part runs a part that is not a seed's.
func part(t *testing.T, part string) {
	t.Helper()
	b, err := build()
	if err != nil {
		t.Fatal(err)
	}
	out, err := runPart(t.Context(), b, part)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(out)
}

// TestCrowds lets many threads and processes want the same pages at once.
func TestCrowds(t *testing.T) {
	for _, c := range []string{"threads 300", "processes 200", "storm 150"} {
		for _, policy := range []pager.Policy{pager.Lazy, pager.Complete} {
			t.Run(fmt.Sprint(c, " ", policy), func(t *testing.T) { part(t, fmt.Sprintf("crowd=%s %s", c, policy)) })
		}
	}
}

func runCrowd(ctx context.Context, arg string) error {
	words := strings.Fields(arg)
	r, c, err := newRun(ctx, false, os.Getenv("TORTURE_CROWD"), words[0], words[1])
	if err != nil {
		return err
	}
	if err := r.restore(ctx, c, options{policy: pager.Policy(words[2]), present: 0.3, latency: 3 * time.Millisecond}); err != nil {
		return fmt.Errorf("%w\n%+v", err, r.result)
	}
	fmt.Printf("%+v", r.result)
	return nil
}

// TestRepeat restores one checkpoint many times in one process, which must then
// be as it was, and looks whether the fault handler sleeps while nothing faults.
func TestRepeat(t *testing.T) { part(t, fmt.Sprint("repeat=", *restores)) }

func runRepeat(ctx context.Context, arg string) error {
	n, err := strconv.Atoi(arg)
	if err != nil {
		return err
	}
	// A seed with threads, forks and children that outlive the checkpoint.
	seed := uint64(1)
	for mix(seed)>>8&0x21 != 0x20 || mix(seed)>>16%4 != 1 {
		seed++
	}
	r, c, err := newRun(ctx, false, os.Getenv("TORTURE_PROGRAM"), strconv.FormatUint(seed, 10), "50", "30")
	if err != nil {
		return err
	}
	written, err := os.Stat(r.output())
	if err != nil {
		return err
	}
	warm := min(n/2, 20) // until then pools and caches grow
	var before, after resources
	for i := range n {
		if i == warm {
			before = used()
		}
		o := plan(uint64(i))
		if i == 0 {
			o.policy, o.fill, o.resumed = pager.Lazy, false, idle
		}
		if err := r.restore(ctx, c, o); err != nil {
			return fmt.Errorf("restore %d: %w\n%+v\n%+v", i, err, o, r.result)
		}
		// CRIU wants files to be as long as they were.
		if err := os.Truncate(r.output(), written.Size()); err != nil {
			return err
		}
	}
	after = used()
	fmt.Printf("%d restores: %+v, then %+v", n, before, after)
	if after.Descriptors > before.Descriptors || after.Goroutines > before.Goroutines || after.Memory > before.Memory+8<<20 {
		return errors.New(": leaks")
	}
	return nil
}

// resources are what a process uses.
type resources struct {
	Descriptors, Goroutines int
	Memory                  int64 // bytes in RAM
}

func used() resources {
	debug.FreeOSMemory()
	var u resources
	if d, err := os.ReadDir("/proc/self/fd"); err == nil {
		u.Descriptors = len(d)
	}
	u.Goroutines = runtime.NumGoroutine()
	var size, resident int64
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		fmt.Sscan(string(text), &size, &resident)
	}
	u.Memory = resident * int64(os.Getpagesize())
	return u
}

// idle measures the CPU time of this process while the restored one waits.
func idle(*pager.Pager) error {
	const long, most = 500 * time.Millisecond, 25 * time.Millisecond
	var a, b unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &a)
	<-time.After(long)
	if err = errors.Join(err, unix.Getrusage(unix.RUSAGE_SELF, &b)); err != nil {
		return err
	}
	if d := time.Duration(b.Utime.Nano() + b.Stime.Nano() - a.Utime.Nano() - a.Stime.Nano()); d > most {
		return fmt.Errorf("the fault handler used %v of CPU in %v in which nothing faulted", d, long)
	}
	return nil
}
