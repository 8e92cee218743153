// SPDX-License-Identifier: Apache-2.0

package spans

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/pkg/tracing"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/types/known/emptypb"
)

// sink keeps the names of spans.
type sink struct {
	Relay // for Start and Stop
	mu    sync.Mutex
	spans map[string]*tracepb.Span
}

func (s *sink) UploadTraces(_ context.Context, spans []*tracepb.ResourceSpans) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rs := range spans {
		for _, ss := range rs.GetScopeSpans() {
			for _, span := range ss.GetSpans() {
				name := span.GetName()
				if span.GetKind() == tracepb.Span_SPAN_KIND_SERVER {
					name += " served"
				}
				s.spans[name] = span
			}
		}
	}
	return nil
}

// TestRelay sends the spans of a client and a server over the server, which passes them on.
func TestRelay(t *testing.T) {
	provider, propagator := otel.GetTracerProvider(), otel.GetTextMapPropagator()
	t.Cleanup(func() {
		otel.SetTracerProvider(provider)
		otel.SetTextMapPropagator(propagator)
	})
	path := filepath.Join(t.TempDir(), "s.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	var client *ttrpc.Client
	relay := Relay{Call: func(ctx context.Context, f func(context.Context, *ttrpc.Client) error) error { return f(ctx, client) }}
	stop, err := Start(t.Context(), "test", relay)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(ServerInterceptor()))
	if err != nil {
		t.Fatal(err)
	}
	collector := &sink{spans: make(map[string]*tracepb.Span)}
	Serve(server, collector)
	server.RegisterService("test.Echo", &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Call": func(ctx context.Context, unmarshal func(any) error) (any, error) {
			_, span := tracing.StartSpan(ctx, "work")
			defer span.End()
			return &emptypb.Empty{}, unmarshal(&emptypb.Empty{})
		},
	}})
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.WithoutCancel(t.Context()), l) }()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	client = ttrpc.NewClient(conn, ttrpc.WithUnaryClientInterceptor(ClientInterceptor()))

	call := func(ctx context.Context) {
		t.Helper()
		if err := client.Call(ctx, "test.Echo", "Call", &emptypb.Empty{}, &emptypb.Empty{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, span := tracing.StartSpan(t.Context(), "root")
	call(ctx)
	span.End()
	call(t.Context()) // in no trace: only the server's own work has a span
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	<-served

	if len(collector.spans) != 4 {
		t.Errorf("%d spans: %v", len(collector.spans), collector.spans)
	}
	parent := func(child string) string {
		for name, s := range collector.spans {
			if string(s.GetSpanId()) == string(collector.spans[child].GetParentSpanId()) {
				return name
			}
		}
		return ""
	}
	for child, want := range map[string]string{"test.Echo/Call": "root", "test.Echo/Call served": "test.Echo/Call"} {
		if got := parent(child); got != want {
			t.Errorf("%s is below %q, not %q", child, got, want)
		}
	}
}

func TestConfigured(t *testing.T) {
	for name, c := range map[string]struct {
		env  map[string]string
		want bool
	}{
		"nothing":     {nil, false},
		"endpoint":    {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, true},
		"traces only": {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, true},
		"disabled":    {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, false},
		"no exporter": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, k := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"} {
				t.Setenv(k, c.env[k])
			}
			if got := Configured(); got != c.want {
				t.Error(got)
			}
		})
	}
}
