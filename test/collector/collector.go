// SPDX-License-Identifier: Apache-2.0

// Package collector is an OpenTelemetry collector that keeps the spans which it gets, for tests and measurements.
package collector

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// maxBody bounds a request in bytes.
const maxBody = 64 << 20

// Span is one span as it was received.
type Span struct {
	Service           string
	Name              string
	Trace, ID, Parent string // hexadecimal; Parent is empty for a root
	Server            bool   // made where a call arrived
	Start, End        time.Time
	Attributes        map[string]string
	Failed            bool
}

// Took is how long the span's operation took.
func (s *Span) Took() time.Duration { return s.End.Sub(s.Start) }

// Collector receives spans as OTLP over HTTP.
type Collector struct {
	server *http.Server
	addr   string
	served chan struct{}

	mu    sync.Mutex
	spans []*Span
	more  chan struct{} // closed and replaced when spans arrive
}

// Listen starts a collector on an address. Close it.
func Listen(addr string) (*Collector, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &Collector{addr: l.Addr().String(), served: make(chan struct{}), more: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", c.traces)
	c.server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		defer close(c.served)
		_ = c.server.Serve(l) // ends with Close
	}()
	return c, nil
}

// URL is what OTEL_EXPORTER_OTLP_ENDPOINT has to be.
func (c *Collector) URL() string { return "http://" + c.addr }

// Setenv makes the programs that are started from now on send their spans to the collector, soon.
func (c *Collector) Setenv() error {
	return errors.Join(os.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL()), os.Setenv("OTEL_BSP_SCHEDULE_DELAY", "100"))
}

// Close ends the collector.
func (c *Collector) Close() error {
	err := c.server.Close()
	<-c.served
	return err
}

func (c *Collector) traces(w http.ResponseWriter, r *http.Request) {
	if t := r.Header.Get("Content-Type"); t != "application/x-protobuf" {
		http.Error(w, "content type "+t, http.StatusUnsupportedMediaType)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var data tracepb.TracesData
	if err := proto.Unmarshal(body, &data); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.WriteHeader(http.StatusOK) // an empty message: all accepted
	c.add(&data)
}

func (c *Collector) add(data *tracepb.TracesData) {
	var got []*Span
	for _, rs := range data.GetResourceSpans() {
		service := attributes(rs.GetResource().GetAttributes())["service.name"]
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				got = append(got, &Span{
					Service: service, Name: s.GetName(),
					Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
					Server: s.GetKind() == tracepb.Span_SPAN_KIND_SERVER,
					Start:  time.Unix(0, int64(s.GetStartTimeUnixNano())), End: time.Unix(0, int64(s.GetEndTimeUnixNano())),
					Attributes: attributes(s.GetAttributes()),
					Failed:     s.GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR,
				})
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spans = append(c.spans, got...)
	close(c.more)
	c.more = make(chan struct{})
}

func attributes(in []*commonpb.KeyValue) map[string]string {
	out := make(map[string]string, len(in))
	for _, kv := range in {
		switch v := kv.GetValue().GetValue().(type) {
		case *commonpb.AnyValue_StringValue:
			out[kv.GetKey()] = v.StringValue
		case *commonpb.AnyValue_IntValue:
			out[kv.GetKey()] = fmt.Sprint(v.IntValue)
		default:
			out[kv.GetKey()] = kv.GetValue().String()
		}
	}
	return out
}

// Trace is all spans of one trace, by their start.
type Trace []*Span

// Traces returns what was received so far.
func (c *Collector) Traces() []Trace {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sorted()
}

func (c *Collector) sorted() []Trace {
	by := make(map[string]Trace)
	for _, s := range c.spans {
		by[s.Trace] = append(by[s.Trace], s)
	}
	var out []Trace
	for _, t := range by {
		slices.SortStableFunc(t, func(a, b *Span) int { return a.Start.Compare(b.Start) })
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b Trace) int { return a[0].Start.Compare(b[0].Start) })
	return out
}

// Await returns the first trace that is complete by the given measure.
func (c *Collector) Await(ctx context.Context, complete func(Trace) bool) (Trace, error) {
	for {
		c.mu.Lock()
		traces, more := c.sorted(), c.more
		c.mu.Unlock()
		for _, t := range traces {
			if complete(t) {
				return t, nil
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), fmt.Errorf("none of %d traces is complete", len(traces)))
		}
	}
}

// Find returns the first span with a name, nil if there is none; of a call, the end at which it arrived.
func (t Trace) Find(name string) *Span {
	var found *Span
	for _, s := range t {
		if s.Name == name && (found == nil || s.Server && !found.Server) {
			found = s
		}
	}
	return found
}

// Parents returns the names of a span's parents, the nearest first.
func (t Trace) Parents(s *Span) (names []string) {
	for s.Parent != "" {
		i := slices.IndexFunc(t, func(p *Span) bool { return p.ID == s.Parent })
		if i < 0 {
			return append(names, "missing "+s.Parent)
		}
		s = t[i]
		names = append(names, s.Name)
	}
	return names
}
