// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/restore"
)

// metrics are what the daemon counts. Names and labels are stable; they are
// listed in docs/operations.md.
type metrics struct {
	registry *prometheus.Registry

	results  *prometheus.CounterVec
	latency  *prometheus.HistogramVec
	bytes    prometheus.Counter
	requests prometheus.Counter
}

func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "thaw_restores_total",
			Help: "Containers by what came of their restore: none (no checkpoint in the image), refused, prepared, running, failed.",
		}, []string{"result"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "thaw_fetch_duration_seconds",
			Help:    "How long requests for page data took; demand is true when a process waited.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 16),
		}, []string{"demand"}),
		bytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "thaw_registry_bytes_total", Help: "Bytes received from registries.",
		}),
		requests: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "thaw_registry_requests_total", Help: "HTTP requests sent to registries.",
		}),
	}
	m.registry.MustRegister(m.results, m.latency, m.bytes, m.requests,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// pages exports a page store's counters.
func (m *metrics) pages(s *pagestore.Store) {
	for _, c := range []struct {
		name, help string
		value      func(pagestore.Stats) int64
	}{
		{"thaw_cache_chunks_fetched_total", "Chunks fetched, verified and stored.", func(s pagestore.Stats) int64 { return s.Chunks }},
		{"thaw_cache_hits_total", "Chunks asked for that were in the page store.", func(s pagestore.Stats) int64 { return s.Hits }},
		{"thaw_cache_shared_total", "Chunks asked for that were being fetched for another restore already.", func(s pagestore.Stats) int64 { return s.Shared }},
		{"thaw_cache_damaged_total", "Chunks that arrived damaged.", func(s pagestore.Stats) int64 { return s.Damaged }},
		{"thaw_cache_evictions_total", "Page blobs removed to make room.", func(s pagestore.Stats) int64 { return s.Evictions }},
	} {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: c.name, Help: c.help},
			func() float64 { return float64(c.value(s.Stats())) }))
	}
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "thaw_cache_bytes", Help: "What the page store takes on disk."},
		func() float64 { return float64(s.Stats().Bytes) }))
}

// restores exports the number of restored containers.
func (m *metrics) restores(r *restore.Manager) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "thaw_restored_containers", Help: "Restored containers on this node now."},
		func() float64 { return float64(len(r.List())) }))
}

func (m *metrics) fetched(took time.Duration, _ int64, demand bool) {
	m.latency.WithLabelValues(strconv.FormatBool(demand)).Observe(took.Seconds())
}

func (m *metrics) received(requests, bytes int64) {
	m.requests.Add(float64(requests))
	m.bytes.Add(float64(bytes))
}

func (m *metrics) prepared(resp *api.PrepareResponse, err error) {
	result := "none"
	switch {
	case err != nil:
		result = "refused"
	case resp.GetRestore():
		result = "prepared"
	}
	m.results.WithLabelValues(result).Inc()
}

// reported counts a restore once when it runs and once when it fails.
func (m *metrics) reported(before string, now *api.Status) {
	running := func(state string) bool { return state == restore.StateLazy || state == restore.StateComplete }
	switch state := now.GetState(); {
	case running(state) && !running(before):
		m.results.WithLabelValues("running").Inc()
	case state == restore.StateFailed && before != restore.StateFailed:
		m.results.WithLabelValues("failed").Inc()
	}
}

// handler serves metrics and health.
func (m *metrics) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n"))
	})
	return mux
}
