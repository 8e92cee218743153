// SPDX-License-Identifier: Apache-2.0

package spans

import (
	"context"

	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/types/known/emptypb"
)

// The relay is OTLP's own service over ttrpc. Its messages are encoded alike; those of
// its Go package bring gRPC with them.
const (
	service = "opentelemetry.proto.collector.trace.v1.TraceService"
	export  = "Export"
)

// Relay hands spans to the daemon: an otlptrace.Client. Call calls a function with
// a connection to it.
type Relay struct {
	Call func(context.Context, func(context.Context, *ttrpc.Client) error) error
}

var _ otlptrace.Client = Relay{}

// Start implements otlptrace.Client.
func (Relay) Start(context.Context) error { return nil }

// Stop implements otlptrace.Client.
func (Relay) Stop(context.Context) error { return nil }

// UploadTraces implements otlptrace.Client.
func (r Relay) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	return r.Call(ctx, func(ctx context.Context, c *ttrpc.Client) error {
		return c.Call(ctx, service, export, &tracepb.TracesData{ResourceSpans: spans}, &emptypb.Empty{})
	})
}

// Serve makes a server send on what relays hand to it.
func Serve(s *ttrpc.Server, to otlptrace.Client) {
	s.RegisterService(service, &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		export: func(ctx context.Context, unmarshal func(any) error) (any, error) {
			var data tracepb.TracesData
			if err := unmarshal(&data); err != nil {
				return nil, err
			}
			return &emptypb.Empty{}, to.UploadTraces(ctx, data.GetResourceSpans())
		},
	}})
}
