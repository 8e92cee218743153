// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/criulog"
	"thaw.dev/thaw/criu/lazypages"
	"thaw.dev/thaw/shim/headstart"
	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/keeper"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/premount"
	"thaw.dev/thaw/snapshotter/workingset"
)

const (
	// criuConfigAnnotation names the configuration file that runc hands to CRIU.
	// CRIU reads it after the options that runc itself sets.
	criuConfigAnnotation = "org.criu.config"

	// reportInterval is how often a restore that makes progress tells the daemon.
	reportInterval = time.Second

	// releaseTimeout bounds how long the end of a container waits for the daemon.
	releaseTimeout = 10 * time.Second
)

// restored is one container that is, or is about to be, restored.
type restored struct {
	id, namespace string
	dir           string // all that the restore needs for itself; see scratchDir
	work          string // CRIU's work directory: its socket and its log
	config        string // CRIU's configuration file
	rootfs        string // where the root filesystem is once the task is created
	prepared      *api.PrepareResponse
	service       *service
	pod           string // namespace/name, of CRI containers

	pager       *pager.Pager
	fetcher     *fetcher
	listener    *lazypages.Listener
	keeper      *keeper.Client
	breakpoints *headstart.Breakpoints // until the restore is over
	cgroups     []string               // where the kernel lists the container's processes
	oomScore    *int                   // what the spec says
	started     time.Time

	recording  recording // of report, and of close when that has ended
	criuTraced bool      // as recording

	stop    context.CancelFunc // ends serve and report
	running sync.WaitGroup

	failOnce  sync.Once
	mu        sync.Mutex
	failure   error           // why the container had to be killed
	control   any             // its cgroup, once it runs
	filled    bool            // faults no longer tell what is touched
	expected  *workingset.Set // by which memory is filled; nil: nothing is known
	restoring context.Context // has the span of the restore, once there is one
	closed    bool
}

// newRestored makes everything ready for `runc restore` that must be there
// before it runs. It changes the bundle: the configuration names CRIU's options.
func newRestored(ctx context.Context, s *service, ns string, r *taskapi.CreateTaskRequest, spec *specs.Spec, opts *runcoptions.Options, prepared *api.PrepareResponse) (_ *restored, err error) {
	ctx, span := startSpan(ctx, "Ready")
	defer span.End()
	c := &restored{
		id: r.ID, namespace: ns,
		dir:      scratchDir(s.node.address, ns, r.ID),
		prepared: prepared,
		service:  s,
		started:  time.Now(),
	}
	if spec.Process != nil {
		c.oomScore = spec.Process.OOMScoreAdj
	}
	c.work, c.config = filepath.Join(c.dir, "work"), filepath.Join(c.dir, "criu.conf")
	if name := spec.Annotations["io.kubernetes.cri.sandbox-name"]; name != "" {
		c.pod = spec.Annotations["io.kubernetes.cri.sandbox-namespace"] + "/" + name
	}
	c.breakpoints = headstart.PrepareBreakpoints()
	// What goes on after the request is no part of its trace.
	run, stop := context.WithCancel(log.WithLogger(context.Background(), log.G(ctx)))
	c.stop = stop
	defer func() {
		if err != nil {
			c.close(ctx)
		}
	}()
	if c.rootfs, err = rootfsOf(r.Bundle, spec); err != nil {
		return nil, err
	}
	if c.cgroups, err = cgroupDirs(spec, opts.SystemdCgroup); err != nil {
		return nil, err
	}
	// There is something only if a shim was killed and nobody cleaned up yet.
	if err := removeScratch(c.dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.work, 0o700); err != nil {
		return nil, err
	}
	c.filled = pager.Policy(prepared.Policy) == pager.Complete
	opts = proto.Clone(opts).(*runcoptions.Options)
	opts.CriuWorkPath = c.work
	if r.Options, err = typeurl.MarshalAnyToProto(opts); err != nil {
		return nil, err
	}
	var g errgroup.Group // the container waits: at the same time what can be
	g.Go(func() error { return c.layOut(ctx, r.Bundle, spec) })
	g.Go(c.listen)
	if err := g.Wait(); err != nil {
		return nil, err
	}
	c.running.Add(3)
	go c.expect(run)
	go c.serve(run)
	go c.report(run)
	return c, nil
}

// layOut makes what CRIU reads: its images as this container gets them, and its
// options.
func (c *restored) layOut(ctx context.Context, bundle string, spec *specs.Spec) error {
	hostname, err := hostnameOf(spec)
	if err != nil {
		return err
	}
	plan, mounts := c.premount(ctx)
	view := filepath.Join(c.dir, "images")
	if err := makeView(view, c.prepared.ImagesDir, hostname, plan); err != nil {
		return err
	}
	c.prepared.ImagesDir = view
	options, err := criu.RestoreOptions{LazyPages: true, LogFile: criulog.Restore, Mounts: mounts, Verbosity: 4}.Encode()
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.config, options, 0o600); err != nil {
		return err
	}
	return annotate(bundle, c.config)
}

// listen makes the fault handler, and the socket on which CRIU finds it.
func (c *restored) listen() (err error) {
	who := keeper.Container{RestoreID: c.prepared.RestoreId, Cgroups: c.cgroups}
	if c.keeper, err = keeper.Dial(keeperAddress(c.service.node.address), who); err != nil {
		return err
	}
	if c.pager, err = c.newPager(); err != nil {
		return err
	}
	c.listener, err = lazypages.Listen(c.work)
	return err
}

// rootfsOf returns where runc finds a container's root filesystem.
func rootfsOf(bundle string, spec *specs.Spec) (string, error) {
	switch {
	case spec.Root == nil || spec.Root.Path == "":
		return "", errors.New("the container's spec names no root filesystem")
	case filepath.IsAbs(spec.Root.Path):
		return spec.Root.Path, nil
	}
	return filepath.Join(bundle, spec.Root.Path), nil
}

// scratchDir is the folder of one restore: CRIU's images as this container gets
// them, CRIU's work directory and options. It is beside the images that restores
// share, so that links to them are possible.
func scratchDir(node, namespace, id string) string {
	// No name in containerd has a tilde.
	return filepath.Join(filepath.Dir(node), "container-"+namespace+"~"+id)
}

// mountsDir is where in it CRIU finds mounts that were made for it.
const mountsDir = "mounts"

// removeScratch removes the folder of a restore, with what is mounted in it.
func removeScratch(dir string) error {
	if err := premount.Remove(filepath.Join(dir, mountsDir)); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// premount makes the mounts that the daemon has planned, and returns the plan and
// their paths; none, if that cannot be: CRIU can make them all.
func (c *restored) premount(ctx context.Context) (*premount.Plan, map[string]string) {
	dir := filepath.Join(c.dir, mountsDir)
	if !criu.PlainPath(dir) {
		return nil, nil
	}
	plan, err := premount.Read(c.prepared.ImagesDir)
	if plan == nil && err == nil {
		return nil, nil
	}
	var mounts map[string]string
	if err == nil {
		mounts, err = premount.Make(dir, plan)
	}
	if err != nil {
		log.G(ctx).WithError(err).WithField("container", c.id).Warn("thaw: mounts are left to CRIU")
		if err := premount.Remove(dir); err != nil {
			log.G(ctx).WithError(err).Warn("thaw: remove mounts")
		}
		return nil, nil
	}
	return plan, mounts
}

// annotate names CRIU's configuration file in the bundle's configuration, of which
// all else stays as containerd wrote it, whether this version of thaw knows it or
// not. Whatever the pod or the image said there is replaced.
func annotate(bundle, config string) error {
	path := filepath.Join(bundle, specFile)
	in, err := readBounded(path, maxSpec)
	if err != nil {
		return err
	}
	var spec map[string]json.RawMessage
	if err := json.Unmarshal(in, &spec); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	annotations := make(map[string]string)
	if a := spec["annotations"]; a != nil {
		if err := json.Unmarshal(a, &annotations); err != nil {
			return fmt.Errorf("annotations in %s: %w", path, err)
		}
	}
	annotations[criuConfigAnnotation] = config
	if spec["annotations"], err = json.Marshal(annotations); err != nil {
		return err
	}
	out, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", out, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (c *restored) newPager() (*pager.Pager, error) {
	b, err := readBounded(c.prepared.PageIndex, pageindex.MaxEncodedSize)
	if err != nil {
		return nil, err
	}
	index, err := pageindex.Parse(b)
	if err != nil {
		return nil, err
	}
	stores := make([]pager.Store, len(c.prepared.Stores))
	for i, s := range c.prepared.Stores {
		stores[i] = pager.Store{Data: s.Data, Present: s.Present}
	}
	c.fetcher = &fetcher{c.service.node, c.prepared.RestoreId}
	return pager.New(pager.Config{
		Index:   index,
		Stores:  stores,
		Fetcher: c.fetcher,
		Holder:  c.keeper,
		Policy:  pager.Policy(c.prepared.Policy),
		OnFatal: c.fail,
	})
}

// serve takes what CRIU hands over until the restore is complete.
func (c *restored) serve(ctx context.Context) {
	defer c.running.Done()
	err := c.listener.Serve(ctx, handler{c.pager, c.trace})
	if err == nil || ctx.Err() != nil {
		return
	}
	if errors.Is(err, lazypages.ErrIncomplete) {
		// runc fails as well and CRIU's log says why, better than this end of
		// the socket could. Nothing may be left that waits for a page.
		_ = c.kill() // which logs
		return
	}
	c.fail(err)
}

// fail is called when the container can not go on without the danger of a wrong
// page: it is killed, while its userfaultfds are still open.
func (c *restored) fail(reason error) {
	c.failOnce.Do(func() {
		c.mu.Lock()
		c.failure = errors.New(api.Line(reason.Error()))
		c.mu.Unlock()
		log.L.WithError(reason).WithField("container", c.id).WithField("image", c.prepared.Image).
			Error("thaw: killing the container, its memory cannot be completed")
		_ = c.kill()
	})
}

// kill kills all processes of the container and returns when they are gone. An
// error was logged.
func (c *restored) kill() error {
	err := keeper.Kill(context.Background(), c.cgroups)
	if err != nil {
		log.L.WithError(err).WithField("container", c.id).Error("thaw: kill container")
	}
	return err
}

// start restores the container by starting the task that was created with a
// checkpoint. When it returns without error the processes run.
func (c *restored) start(ctx context.Context, upstream func(context.Context) (*taskapi.StartResponse, error)) (*taskapi.StartResponse, error) {
	if err := c.admit(ctx); err != nil {
		return nil, err
	}
	resp, err := c.restore(ctx, upstream)
	c.mu.Lock()
	failure := c.failure
	c.mu.Unlock()
	if err == nil && failure == nil {
		// From here on the file is read when this container is dumped, for which
		// the restore's options would be wrong.
		err = os.WriteFile(c.config, nil, 0o600)
	}
	if err == nil && failure == nil {
		if c.oomScore != nil {
			if err := setOOMScores(c.cgroups, *c.oomScore); err != nil {
				log.G(ctx).WithError(err).WithField("container", c.id).Warn("thaw: OOM score of the checkpoint stays")
			}
		}
		control, err := c.service.accounting.watch(c.id, int(resp.Pid))
		if err != nil { // not worth the container
			log.G(ctx).WithError(err).WithField("container", c.id).Warn("thaw: no statistics or OOM events")
		}
		c.mu.Lock()
		c.control = control
		c.mu.Unlock()
		return resp, nil
	}
	_ = c.kill()
	if failure != nil {
		err = failure
	}
	return nil, c.explain(err)
}

// restore runs `runc restore`.
func (c *restored) restore(ctx context.Context, upstream func(context.Context) (*taskapi.StartResponse, error)) (*taskapi.StartResponse, error) {
	ctx, span := startSpan(ctx, "Restore")
	defer span.End()
	c.setTrace(ctx)
	moved := make(chan error, 1)
	go func() { moved <- headstart.MoveToCgroup() }() // runc starts meanwhile
	resp, err := upstream(ctx)
	if err := errors.Join(<-moved, c.breakpoints.Close()); err != nil {
		log.G(ctx).WithError(err).Debug("thaw: no head start")
	}
	// The container has its own by now, or never will.
	if err := premount.Remove(filepath.Join(c.dir, mountsDir)); err != nil {
		log.G(ctx).WithError(err).Warn("thaw: remove mounts")
	}
	c.countFaults(ctx)
	return resp, err
}

// admit asks the daemon again whether the restore may be: Create has mounted the
// root filesystem, whose links could lead CRIU elsewhere than the images say.
func (c *restored) admit(ctx context.Context) error {
	err := c.service.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
		_, err := n.Admit(ctx, &api.AdmitRequest{RestoreId: c.prepared.RestoreId, Rootfs: c.rootfs})
		return err
	})
	if err == nil {
		return nil
	}
	err = fmt.Errorf("thaw: %w", err)
	c.mu.Lock()
	c.failure = err
	c.mu.Unlock()
	return err
}

// explain makes the one line that tells why a restore failed, and keeps CRIU's
// log where it outlives the bundle.
func (c *restored) explain(err error) error {
	quote := quoteLog(filepath.Join(c.work, criulog.Restore))
	kept, keepErr := criulog.Keep(criulog.Dir, c.id, c.work, criulog.Restore)
	var b strings.Builder
	fmt.Fprintf(&b, "thaw: restore of %s failed: ", c.prepared.Image)
	if quote != "" {
		fmt.Fprintf(&b, "criu: %s", quote)
	} else {
		b.WriteString(api.Line(err.Error()))
	}
	if keepErr == nil {
		fmt.Fprintf(&b, " (CRIU's log: %s)", kept)
	}
	reason := errors.New(b.String())
	c.mu.Lock()
	c.failure = reason
	c.mu.Unlock()
	return reason
}

// quoteLog returns the first error in CRIU's log, "" if there is none.
func quoteLog(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	quote, err := criu.FirstError(f)
	if err != nil {
		log.L.WithError(err).Warn("thaw: read CRIU's log")
	}
	return quote
}

// cgroup returns the container's cgroup, nil while it does not run.
func (c *restored) cgroup() any {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.control
}

// complete fills all of the container's memory and ends its laziness.
func (c *restored) complete(ctx context.Context) error {
	c.mu.Lock()
	c.filled = true
	c.mu.Unlock()
	return c.pager.Fill(ctx)
}

// close ends the restore. The container's processes must be dead or must not
// have been restored; those that are left over are killed.
func (c *restored) close(ctx context.Context) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.mu.Unlock()
	killed := c.kill()
	c.stop()
	c.running.Wait()
	_ = c.breakpoints.Close() // if it was never started
	if c.listener != nil {
		if err := c.listener.Close(); err != nil {
			log.G(ctx).WithError(err).Warn("thaw: close lazy-pages socket")
		}
	}
	c.traceCRIU()
	if killed != nil {
		// Somebody may be left, who would read zeros where pages are missing. All
		// stays as it is; when this process ends, the daemon tries to kill again.
		return
	}
	if c.pager != nil {
		c.record(ctx, c.status().State, true)
		c.pager.Close()
	}
	if c.keeper != nil {
		if err := c.keeper.Done(); err != nil {
			log.G(ctx).WithError(err).Warn("thaw: release descriptors held by the daemon")
		}
	}
	if err := removeScratch(c.dir); err != nil {
		log.G(ctx).WithError(err).Warn("thaw: remove the restore's folder")
	}
	c.service.release(ctx, c.prepared.RestoreId)
}

// report tells the daemon how the restore is doing, as long as that changes.
func (c *restored) report(ctx context.Context) {
	defer c.running.Done()
	tick := time.NewTicker(reportInterval)
	defer tick.Stop()
	var last *api.Status
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		status := c.status()
		if status.State != "restoring" {
			c.traceCRIU()
		}
		c.record(ctx, status.State, false)
		if last != nil && proto.Equal(last, status) {
			continue
		}
		err := c.service.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
			_, err := n.Report(ctx, &api.ReportRequest{Status: status})
			return err
		})
		if err != nil {
			log.G(ctx).WithError(err).Debug("thaw: report")
			continue
		}
		last = status
	}
}

func (c *restored) status() *api.Status {
	st := c.pager.Stats()
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &api.Status{
		RestoreId: c.prepared.RestoreId, Namespace: c.namespace, ContainerId: c.id,
		Image: c.prepared.Image, Pod: c.pod, State: st.State,
		PagesTotal: st.PagesTotal, PagesPresent: st.PagesPresent,
		Faults: st.Faults, RemoteFaults: st.RemoteFaults,
		FaultWaitP50Ns: uint64(st.FaultWaitP50), FaultWaitP99Ns: uint64(st.FaultWaitP99),
		StartedUnixNs: c.started.UnixNano(),
	}
	if c.failure != nil {
		s.State, s.Reason = "failed", c.failure.Error()
	}
	return s
}
