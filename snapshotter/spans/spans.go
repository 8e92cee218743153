// SPDX-License-Identifier: Apache-2.0

// Package spans gets the spans of thaw's processes to an OpenTelemetry collector, if
// the environment names one, by the variables that containerd itself goes by.
// Spans are made with containerd's package tracing; without a collector they are
// nothing, and nothing is started here.
//
// The daemon sends its spans with OpenTelemetry's own exporter. Shims, of which there
// is one for each pod, have no share in what that needs of memory: they hand
// theirs to the daemon (Relay, Serve), in the form in which it sends them on.
package spans

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/containerd/log"
	"github.com/containerd/otelttrpc"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// stopTimeout bounds how long the last spans may take to be sent.
const stopTimeout = 2 * time.Second

// Configured reports whether the environment names a collector.
func Configured() bool {
	if off, _ := strconv.ParseBool(os.Getenv("OTEL_SDK_DISABLED")); off || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// Start makes all spans of this process go to a client. The service name is that of
// the environment, or else the given one. stop sends what is left, in bounded
// time. Interceptors must be made after Start.
func Start(ctx context.Context, service string, to otlptrace.Client) (stop func() error, err error) {
	exporter, err := otlptrace.New(ctx, to)
	if err != nil {
		return nil, err
	}
	about, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", service)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	p := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(about))
	otel.SetTracerProvider(p)
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.G(ctx).WithError(err).Warn("spans not sent") }))
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		return p.Shutdown(ctx)
	}, nil
}

// ServerInterceptor makes a span of each call that belongs to a trace. What a
// caller does on its own, page by page, has none.
func ServerInterceptor() ttrpc.UnaryServerInterceptor {
	traced := otelttrpc.UnaryServerInterceptor()
	return func(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		if _, ok := ttrpc.GetMetadataValue(ctx, "traceparent"); !ok {
			return method(ctx, unmarshal)
		}
		return traced(ctx, unmarshal, info, method)
	}
}

// ClientInterceptor makes a span of each call within a span, whose trace the
// server can go on with.
func ClientInterceptor() ttrpc.UnaryClientInterceptor {
	traced := otelttrpc.UnaryClientInterceptor()
	return func(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
		if !trace.SpanContextFromContext(ctx).IsValid() {
			return invoke(ctx, req, resp)
		}
		return traced(ctx, req, resp, info, invoke)
	}
}
