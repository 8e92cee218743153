// SPDX-License-Identifier: Apache-2.0

// Package faultproxy is a reverse proxy in front of a registry that does what networks, registries and their storage do
// on bad days: it resets, stalls, truncates, lies, asks for tokens, and hides content behind addresses that expire.
//
// It is a real server on the loopback interface: what a client sees of a fault is what its kernel makes of it.
package faultproxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"time"
)

// Proxy is a running proxy. Its methods may be called from several goroutines.
type Proxy struct {
	handler http.Handler
	address string
	config  *tls.Config // nil: plain HTTP
	ca      []byte

	mu       sync.Mutex
	server   *http.Server // nil while it is down
	serving  sync.WaitGroup
	fault    Fault
	requests []Request
	conns    map[*conn]struct{}
}

// Request is what a client sent.
type Request struct {
	Time   time.Time
	Method string
	Path   string
	Range  string // the header
}

// Start serves on a free port of 127.0.0.1 what backend ("host:port") serves. Close ends it.
func Start(backend string) (*Proxy, error) { return start(backend, nil, nil) }

// StartTLS is Start with a certificate that nobody trusts who was not given CA.
func StartTLS(backend string) (*Proxy, error) {
	cert, ca, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("faultproxy: %w", err)
	}
	return start(backend, &tls.Config{Certificates: []tls.Certificate{cert}}, ca)
}

func start(backend string, config *tls.Config, ca []byte) (*Proxy, error) {
	quiet := log.New(io.Discard, "", 0)
	next := &httputil.ReverseProxy{
		Rewrite:  func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: backend}) },
		ErrorLog: quiet,
	}
	p := &Proxy{address: "127.0.0.1:0", config: config, ca: ca, conns: make(map[*conn]struct{})}
	p.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.requests = append(p.requests, Request{time.Now(), r.Method, r.URL.Path, r.Header.Get("Range")})
		fault := p.fault
		p.mu.Unlock()
		if fault != nil {
			fault(w, r, next)
			return
		}
		next.ServeHTTP(w, r)
	})
	return p, p.Up()
}

// Up lets a proxy that is down listen again, on the same port.
func (p *Proxy) Up() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil {
		return nil
	}
	l, err := net.Listen("tcp", p.address)
	if err != nil {
		return fmt.Errorf("faultproxy: %w", err)
	}
	p.address = l.Addr().String()
	l = &listener{l, p}
	if p.config != nil {
		l = tls.NewListener(l, p.config)
	}
	server := &http.Server{Handler: p.handler, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: 10 * time.Second}
	p.server = server
	p.serving.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			panic(err)
		}
	})
	return nil
}

// Down ends all connections; new ones are refused.
func (p *Proxy) Down() error {
	p.mu.Lock()
	server := p.server
	p.server = nil
	p.mu.Unlock()
	if server == nil {
		return nil
	}
	err := server.Close()
	p.serving.Wait()
	return err
}

// Close ends the proxy.
func (p *Proxy) Close() error { return p.Down() }

// Addr is the host:port to put before repository names.
func (p *Proxy) Addr() string { return p.address }

// URL is where it serves.
func (p *Proxy) URL() string {
	if p.config != nil {
		return "https://" + p.address
	}
	return "http://" + p.address
}

// CA is the certificate to trust, in PEM; nil without TLS.
func (p *Proxy) CA() []byte { return p.ca }

// Inject gives requests that begin afterwards to a fault; nil is none.
func (p *Proxy) Inject(f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = f
}

// Requests lists the requests since Reset.
func (p *Proxy) Requests() []Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.requests)
}

// Reset forgets the requests so far.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = nil
}

// Forget makes a black hole of each connection that is open, as a firewall does that forgot them: nothing is answered
// there any more, and nobody is told. New ones work.
func (p *Proxy) Forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.forget()
	}
}

type listener struct {
	net.Listener
	proxy *Proxy
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	wrapped := &conn{Conn: c, proxy: l.proxy}
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.proxy.conns[wrapped] = struct{}{}
	return wrapped, nil
}

// conn is a connection that can be forgotten.
type conn struct {
	net.Conn
	proxy *Proxy

	mu        sync.Mutex
	forgotten bool
}

func (c *conn) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgotten = true
}

func (c *conn) isForgotten() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.forgotten
}

func (c *conn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.isForgotten() {
			return n, err
		}
	}
}

func (c *conn) Write(p []byte) (int, error) {
	if c.isForgotten() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *conn) Close() error {
	c.proxy.mu.Lock()
	delete(c.proxy.conns, c)
	c.proxy.mu.Unlock()
	return c.Conn.Close()
}

// reset makes the next Close send RST.
func (c *conn) reset() error {
	t, ok := c.Conn.(*net.TCPConn)
	if !ok {
		return errors.New("not a TCP connection")
	}
	return t.SetLinger(0)
}

func selfSigned() (cert tls.Certificate, ca []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return cert, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true, IsCA: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"registry.test"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return cert, nil, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
