// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/log"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/criulog"
	"thaw.dev/thaw/criu/lazypages"
	"thaw.dev/thaw/shim/guard"
	"thaw.dev/thaw/shim/headstart"
	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/keeper"
	"thaw.dev/thaw/snapshotter/premount"
	"thaw.dev/thaw/snapshotter/workingset"
)

// releaseTimeout bounds how long the end of a container waits for the daemon.
const releaseTimeout = 10 * time.Second

// restored is one container that is, or is about to be, restored.
type restored struct {
	id, namespace string
	dir           string // all that the restore needs for itself; see scratchDir
	work          string // CRIU's work directory: its socket and its log
	config        string // CRIU's configuration file
	rootfs        string // where the root filesystem is once the task is created
	criuRoot      string // where CRIU finds it, while runc runs
	prepared      *api.PrepareResponse
	service       *service
	pod           string // namespace/name, of CRI containers
	stderr        string // where its standard error goes; of a terminal, its output

	paged       chan struct{} // closed when there is a pager, or pagerErr is set
	spec        *specs.Spec
	profiled    chan struct{} // closed when there is a filter, or filterErr is set
	filter      []byte        // what runc makes of the spec's seccomp section; nil if that filters nothing
	filterErr   error
	looked      verdict
	pager       *pager.Pager
	pagerErr    error
	listener    *lazypages.Listener
	keeper      *keeper.Client
	guard       *guard.Guard
	breakpoints *headstart.Breakpoints // until the restore is over
	collect     func()                 // lets garbage be collected again
	cgroupPath  string
	cgroups     []string // where the kernel lists the container's processes
	oomScore    *int     // what the spec says
	started     time.Time

	recording  recording // of report, and of close when that has ended
	criuTraced bool      // as recording

	stop    context.CancelFunc // ends what runs
	running sync.WaitGroup

	failOnce  sync.Once
	mu        sync.Mutex
	failure   error           // why the container had to be killed
	control   any             // its cgroup, once it runs
	filled    bool            // faults no longer tell what is touched
	expected  *workingset.Set // by which memory is filled; nil: nothing is known
	restoring context.Context // has the span of the restore, once there is one
	ran       bool            // runc was told to restore: there may be processes
	closed    bool
}

// serve takes what CRIU hands over until the restore is complete.
func (c *restored) serve(ctx context.Context) {
	defer c.endVerify(errNotVerified) // if it was not
	err := c.listener.Serve(ctx, handler{c.pager, c.trace, c.verify})
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
// page, or has what it must not have: it is killed, while its userfaultfds are still open.
func (c *restored) fail(reason error) {
	c.failOnce.Do(func() {
		c.mu.Lock()
		c.failure = errors.New(api.Line(reason.Error()))
		c.mu.Unlock()
		log.L.WithError(reason).WithField("container", c.id).WithField("image", c.prepared.Image).
			Error("thaw: killing the container")
		if err := farewell(c.stderr, "thaw: killing the container: "+api.Line(reason.Error())); err != nil {
			log.L.WithError(err).WithField("container", c.id).Warn("thaw: the container's log does not say why it ends")
		}
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
	if <-c.paged; c.pagerErr != nil {
		return nil, c.refuse(fmt.Errorf("prepare restore of %s: %w", c.prepared.Image, c.pagerErr))
	}
	resp, err := c.restore(ctx, upstream)
	if err == nil {
		err = c.verified(ctx, int(resp.Pid))
	}
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
	return nil, c.explain(err, failure)
}

// restore runs `runc restore`.
func (c *restored) restore(ctx context.Context, upstream func(context.Context) (*taskapi.StartResponse, error)) (*taskapi.StartResponse, error) {
	ctx, span := startSpan(ctx, "Restore")
	defer span.End()
	c.mu.Lock()
	c.ran = true
	c.mu.Unlock()
	c.setTrace(ctx)
	moved := make(chan error, 1)
	go func() { moved <- headstart.MoveToCgroup() }() // runc starts meanwhile
	resp, err := upstream(ctx)
	if err := errors.Join(<-moved, c.breakpoints.Close()); err != nil {
		log.G(ctx).WithError(err).Debug("thaw: no head start")
	}
	if err != nil {
		if err := removeCRIURoot(c.criuRoot); err != nil { // if runc was killed, as it is when the request ends
			log.G(ctx).WithError(err).Error("thaw: clean up behind runc")
		}
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
	if <-c.profiled; c.filterErr != nil {
		return c.refuse(fmt.Errorf("restore of %s: %w", c.prepared.Image, c.filterErr))
	}
	err := c.service.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
		_, err := n.Admit(ctx, &api.AdmitRequest{RestoreId: c.prepared.RestoreId, Rootfs: c.rootfs, SeccompFilter: c.filter})
		return err
	})
	if err == nil {
		return nil
	}
	return c.refuse(err)
}

// refuse notes why the container will not run.
func (c *restored) refuse(err error) error {
	err = fmt.Errorf("thaw: %w", err)
	c.mu.Lock()
	c.failure = err
	c.mu.Unlock()
	return err
}

// explain makes the one line that tells why a restore failed, and keeps CRIU's
// log where it outlives the bundle. A failure of the page handler is the cause of
// what CRIU and runc complain about.
func (c *restored) explain(err, failure error) error {
	quote := quoteLog(filepath.Join(c.work, criulog.Restore))
	kept, keepErr := criulog.Keep(criulog.Dir, c.id, c.work, criulog.Restore)
	var b strings.Builder
	fmt.Fprintf(&b, "thaw: restore of %s failed: ", c.prepared.Image)
	switch {
	case failure != nil:
		b.WriteString(api.Line(failure.Error()))
	case quote != "":
		fmt.Fprintf(&b, "criu: %s", quote)
	default:
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
	if <-c.paged; c.pagerErr != nil {
		return c.pagerErr
	}
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
	ran := c.ran
	c.mu.Unlock()
	var killed error
	if ran {
		killed = c.kill()
	}
	c.stop()
	c.running.Wait()
	_ = c.breakpoints.Close() // if it was never started
	c.collect()
	if c.listener != nil {
		if err := c.listener.Close(); err != nil {
			log.G(ctx).WithError(err).Warn("thaw: close lazy-pages socket")
		}
	}
	c.traceCRIU()
	if killed != nil {
		// Somebody may be left, who would read zeros where pages are missing. All
		// stays as it is; when this process ends, its guard and the daemon try to kill again.
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
	if c.guard != nil {
		c.guard.Stop()
	}
	if ran {
		if err := removeCgroups(c.cgroupPath); err != nil {
			log.G(ctx).WithError(err).Warn("thaw: remove the container's cgroups")
		}
	}
	if err := removeScratch(c.dir); err != nil {
		log.G(ctx).WithError(err).Warn("thaw: remove the restore's folder")
	}
	c.service.release(ctx, c.prepared.RestoreId)
}
