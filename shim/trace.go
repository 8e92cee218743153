// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/pkg/tracing"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/log"
	"github.com/containerd/otelttrpc"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/criulog"
	"thaw.dev/thaw/criu/timeline"
	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/spans"
)

// registerTracing makes containerd's shim framework trace the calls that it
// serves and send what is left when the shim ends. The plugins' names are those
// of containerd's own, by which the framework knows them.
func registerTracing(n *node) {
	registry.Register(&plugin.Registration{
		Type: plugins.InternalPlugin,
		ID:   "tracing",
		InitFn: func(ic *plugin.InitContext) (any, error) {
			stop, err := spans.Start(ic.Context, "containerd-shim-thaw-v1", spans.Relay{Call: n.with})
			if err != nil {
				// Containers are worth more than their traces.
				log.G(ic.Context).WithError(err).Warn("thaw: no traces")
				return nil, plugin.ErrSkipPlugin
			}
			return closer(stop), nil
		},
	})
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "otelttrpc",
		Requires: []plugin.Type{plugins.InternalPlugin},
		InitFn:   func(*plugin.InitContext) (any, error) { return interceptors{}, nil },
	})
}

type closer func() error

var _ io.Closer = closer(nil)

func (c closer) Close() error { return c() }

type interceptors struct{}

func (interceptors) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	return otelttrpc.UnaryServerInterceptor()
}

func (interceptors) UnaryClientInterceptor() ttrpc.UnaryClientInterceptor {
	return otelttrpc.UnaryClientInterceptor()
}

func startSpan(ctx context.Context, name string, opts ...tracing.SpanOpt) (context.Context, *tracing.Span) {
	return tracing.StartSpan(ctx, tracing.Name("thaw.shim", name), opts...)
}

// countFaults adds to the span of a restore how many page faults there were
// until it was over.
func (c *restored) countFaults(ctx context.Context) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	st := c.pager.Stats()
	span.SetAttributes(
		attribute.Int64("faults", int64(st.Faults)),
		attribute.Int64("faults.remote", int64(st.RemoteFaults)),
		attribute.Int64("pages.total", int64(st.PagesTotal)),
		attribute.Int64("pages.present", int64(st.PagesPresent)),
	)
}

// traceCRIU makes spans of what CRIU did when, by its log, once the restore is over.
// Not to be called by two goroutines at the same time.
func (c *restored) traceCRIU() {
	ctx := c.trace()
	if c.criuTraced || !trace.SpanContextFromContext(ctx).IsSampled() {
		return
	}
	c.criuTraced = true
	opened, phases, err := readTimeline(filepath.Join(c.work, criulog.Restore))
	if err != nil {
		log.G(ctx).WithError(err).Debug("thaw: CRIU's phases are not in the trace")
		return
	}
	spanPhases(ctx, opened, "criu", phases)
}

// trace is the context of the restore's span; that of nothing before there is one.
func (c *restored) trace() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.restoring == nil {
		return context.Background()
	}
	return c.restoring
}

func (c *restored) setTrace(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restoring = ctx
}

// readTimeline reads CRIU's log and when that was opened: its lines count from then.
func readTimeline(path string) (opened time.Time, phases []timeline.Phase, err error) {
	f, err := os.Open(path)
	if err != nil {
		return time.Time{}, nil, err
	}
	defer f.Close()
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &st); err != nil {
		return time.Time{}, nil, os.NewSyscallError("statx", err)
	}
	if st.Mask&unix.STATX_BTIME == 0 {
		return time.Time{}, nil, os.NewSyscallError("statx", unix.EOPNOTSUPP)
	}
	phases, err = timeline.Read(f)
	return time.Unix(st.Btime.Sec, int64(st.Btime.Nsec)), phases, err
}

// spanPhases makes spans of phases that are over.
func spanPhases(ctx context.Context, opened time.Time, prefix string, phases []timeline.Phase) {
	tracer := trace.SpanFromContext(ctx).TracerProvider().Tracer("")
	for _, p := range phases {
		ctx, span := tracer.Start(ctx, tracing.Name(prefix, p.Name), trace.WithTimestamp(opened.Add(p.Start)))
		if p.Path != "" {
			span.SetAttributes(attribute.String("path", p.Path))
		}
		spanPhases(ctx, opened, tracing.Name(prefix, p.Name), p.Parts)
		span.End(trace.WithTimestamp(opened.Add(p.End)))
	}
}

// handler passes what CRIU hands over to the fault handler.
type handler struct {
	*pager.Pager
	trace  func() context.Context // of the restore
	verify func()                 // compares the processes with the spec
}

// Task takes over a process.
func (h handler) Task(pid uint32, uffd int) error {
	_, span := startSpan(h.trace(), "HandOver", tracing.WithAttribute("pid", int64(pid)))
	defer span.End()
	err := h.Add(pid, uffd)
	if err != nil {
		span.SetStatus(err)
	}
	return err
}

// Finished ends the hand-over.
func (h handler) Finished() {
	h.Restored()
	trace.SpanFromContext(h.trace()).AddEvent("all processes handed over")
	h.verify()
}
