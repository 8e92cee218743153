// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// Fault answers a request in the place of next, or with its help.
type Fault func(w http.ResponseWriter, r *http.Request, next http.Handler)

// Blobs has a fault for reads of blobs only.
func Blobs(f Fault) Fault {
	return only(f, func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blobs/") })
}

// Manifests has a fault for manifests only.
func Manifests(f Fault) Fault {
	return only(f, func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/manifests/") })
}

func only(f Fault, is func(*http.Request) bool) Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if is(r) {
			f(w, r, next)
			return
		}
		next.ServeHTTP(w, r)
	}
}

// First has a fault for the first n requests only.
func First(n int64, f Fault) Fault {
	var seen atomic.Int64
	return only(f, func(*http.Request) bool { return seen.Add(1) <= n })
}

// Chain lets faults answer each other's questions: the first one's next is the second, and so on.
func Chain(faults ...Fault) Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		for i := len(faults) - 1; i >= 0; i-- {
			f, after := faults[i], next
			next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f(w, r, after) })
		}
		next.ServeHTTP(w, r)
	}
}

// Status answers with a status and headers ("Retry-After: 1").
func Status(code int, headers ...string) Fault {
	return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
		for _, h := range headers {
			name, value, _ := strings.Cut(h, ": ")
			w.Header().Set(name, value)
		}
		w.WriteHeader(code)
	}
}

// Reset resets the connection (TCP RST) after n bytes of the answer's body; 0 is before any of the answer.
func Reset(n int64) Fault { return after(n, reset) }

// Truncate closes the connection (TCP FIN) after n bytes of the answer's body.
func Truncate(n int64) Fault {
	return after(n, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
}

// Stall sends nothing more after n bytes of the answer's body, but keeps the connection; 0 is before any of the answer.
func Stall(n int64) Fault {
	return after(n, func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	})
}

// Damage flips a bit of each answer's body.
func Damage() Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		next.ServeHTTP(&flipper{ResponseWriter: w}, r)
	}
}

// Unranged ignores ranges: the answer is the whole, with status 200.
func Unranged() Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		r.Header.Del("Range")
		next.ServeHTTP(w, r)
	}
}

// Elsewhere answers with another range than the one that was asked for, and says so.
func Elsewhere() Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		var first, last int64
		if n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); n == 2 {
			r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", first+1, last+1))
		}
		next.ServeHTTP(w, r)
	}
}

// Trickle sends a byte of the answer's body at a time.
func Trickle(every time.Duration) Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		next.ServeHTTP(&trickler{ResponseWriter: w, request: r, every: every}, r)
	}
}

// reset resets a connection.
func reset(w http.ResponseWriter, _ *http.Request) {
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer c.Close()
	under := c
	if t, ok := c.(*tls.Conn); ok {
		under = t.NetConn()
	}
	if err := under.(*conn).reset(); err != nil {
		panic(err)
	}
}

// after lets n bytes of an answer's body pass before act.
func after(n int64, act func(http.ResponseWriter, *http.Request)) Fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if n == 0 {
			act(w, r)
			return
		}
		next.ServeHTTP(&limiter{ResponseWriter: w, request: r, left: n, act: act}, r)
	}
}

// limiter acts when its bytes have passed. An answer that is no larger stays whole.
type limiter struct {
	http.ResponseWriter
	request *http.Request
	left    int64
	act     func(http.ResponseWriter, *http.Request)
}

// Unwrap is for http.ResponseController.
func (l *limiter) Unwrap() http.ResponseWriter { return l.ResponseWriter }

func (l *limiter) Write(p []byte) (int, error) {
	if int64(len(p)) <= l.left {
		l.left -= int64(len(p))
		return l.ResponseWriter.Write(p)
	}
	if _, err := l.ResponseWriter.Write(p[:l.left]); err != nil {
		return 0, err
	}
	if err := http.NewResponseController(l.ResponseWriter).Flush(); err != nil {
		return 0, err
	}
	l.act(l.ResponseWriter, l.request)
	panic(http.ErrAbortHandler)
}

// flipped is the byte of a body that a flipper changes.
const flipped = 20

type flipper struct {
	http.ResponseWriter
	sent int
}

// Unwrap is for http.ResponseController.
func (f *flipper) Unwrap() http.ResponseWriter { return f.ResponseWriter }

func (f *flipper) Write(p []byte) (int, error) {
	if at := flipped - f.sent; at >= 0 && at < len(p) {
		p = append([]byte(nil), p...)
		p[at] ^= 1
	}
	n, err := f.ResponseWriter.Write(p)
	f.sent += n
	return n, err
}

type trickler struct {
	http.ResponseWriter
	request *http.Request
	every   time.Duration
}

// Unwrap is for http.ResponseController.
func (t *trickler) Unwrap() http.ResponseWriter { return t.ResponseWriter }

func (t *trickler) Write(p []byte) (int, error) {
	pace := time.NewTicker(t.every)
	defer pace.Stop()
	for i := range p {
		if _, err := t.ResponseWriter.Write(p[i : i+1]); err != nil {
			return i, err
		}
		if err := http.NewResponseController(t.ResponseWriter).Flush(); err != nil {
			return i, err
		}
		select {
		case <-pace.C:
		case <-t.request.Context().Done():
			return i + 1, t.request.Context().Err()
		}
	}
	return len(p), nil
}
