// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"

	"thaw.dev/thaw/snapshotter/spans"
)

// tracer sends the daemon's spans and those that shims hand to it to the collector
// that the environment names; nil if it names none.
type tracer struct {
	client otlptrace.Client
	stop   func() error
}

// startTracing starts a tracer. What is wrong with it is logged: a node
// without traces is better than none.
func startTracing(ctx context.Context) *tracer {
	if !spans.Configured() {
		return nil
	}
	client, err := newTraceClient()
	if err != nil {
		log.G(ctx).WithError(err).Warn("no traces")
		return nil
	}
	stop, err := spans.Start(ctx, "thaw-snapshotter", client)
	if err != nil {
		log.G(ctx).WithError(err).Warn("no traces")
		return nil
	}
	return &tracer{client: client, stop: stop}
}

// newTraceClient chooses the protocol as containerd does; all else the clients read
// from the environment by themselves.
func newTraceClient() (otlptrace.Client, error) {
	if e := os.Getenv("OTEL_TRACES_EXPORTER"); e != "" && e != "otlp" {
		return nil, fmt.Errorf("OTEL_TRACES_EXPORTER is %.40q: otlp and none are known: %w", e, errdefs.ErrInvalidArgument)
	}
	protocol := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
	if protocol == "" {
		protocol = os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL")
	}
	switch protocol {
	case "", "http/protobuf":
		return otlptracehttp.NewClient(), nil
	case "grpc":
		return otlptracegrpc.NewClient(), nil
	}
	return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL is %.40q: http/protobuf and grpc are known: %w", protocol, errdefs.ErrNotImplemented)
}

// options are what a server needs whose calls are traced.
func (t *tracer) options() []ttrpc.ServerOpt {
	if t == nil {
		return nil
	}
	return []ttrpc.ServerOpt{ttrpc.WithUnaryServerInterceptor(spans.ServerInterceptor())}
}

// serve makes a server take the spans of shims.
func (t *tracer) serve(s *ttrpc.Server) {
	if t != nil {
		spans.Serve(s, t.client)
	}
}

// close sends what is left.
func (t *tracer) close(ctx context.Context) {
	if t == nil {
		return
	}
	if err := t.stop(); err != nil {
		log.G(ctx).WithError(err).Warn("last spans not sent")
	}
}
