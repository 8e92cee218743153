// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/log"
)

// enough is how much must arrive within the timeout, in bytes. Less is no
// progress: who sends a byte now and then keeps nobody waiting for ever.
const enough = 64 << 10

var (
	errStalled = errors.New("no byte arrived in time")
	errSlow    = errors.New("bytes arrive too slowly")
)

// Reader reads one range. It is not safe for concurrent use.
type Reader struct {
	repo *Repository
	kind string
	rg   Range // what is still wanted: Offset and Length move with each read
	// query is added to the address.
	query url.Values

	ctx     context.Context
	timeout time.Duration
	progress
	idle time.Time // when the last Read returned

	set   *hostSet // that the hosts are of
	hosts []*host
	state []standing // of each host
	host  int        // that the body comes from, or that is tried next

	body   io.ReadCloser
	served string // the name of the host that the body comes from
	stop   func() // ends the attempt that the body belongs to
	stall  *time.Timer
}

// progress is how a fetch has come along.
type progress struct {
	giveUp  time.Time // without progress until then, the fetch has failed
	owed    int64     // what must arrive before that, in bytes
	round   int       // how often all hosts were tried since the last progress
	renewed bool      // the hosts were read anew since then
}

// standing is what a fetch has come to with one host.
type standing struct {
	err    *Error // its last failure
	warned bool   // it gave an answer that may not be given twice
}

// refused reports whether the host need not be asked again.
func (s *standing) refused() bool { return s.err != nil && !s.err.temporary }

// open starts to read; there is a body when it returns without error, or
// nothing to read.
func (r *Repository) open(ctx context.Context, kind string, rg Range, timeout time.Duration) (*Reader, error) {
	set, err := r.pullHosts()
	if err != nil {
		return nil, err
	}
	ctx, err = docker.ContextWithRepositoryScope(ctx, r.ref, false)
	if err != nil {
		return nil, err
	}
	d := &Reader{repo: r, kind: kind, rg: rg, ctx: ctx, timeout: timeout}
	d.use(set)
	d.begin(time.Now())
	if rg.Length == 0 {
		return d, nil
	}
	return d, d.connect()
}

// use takes hosts over, with the one to avoid behind all others. What is known of
// them stays if they are the same as before.
func (d *Reader) use(set *hostSet) {
	hosts := set.hosts
	if d.rg.Avoid != "" {
		avoided := func(h *host) bool { return h.Host == d.rg.Avoid }
		hosts = slices.DeleteFunc(slices.Clone(set.hosts), avoided)
		for _, h := range set.hosts {
			if avoided(h) {
				hosts = append(hosts, h)
			}
		}
	}
	if !slices.EqualFunc(d.hosts, hosts, (*host).same) {
		d.state, d.host = make([]standing, len(hosts)), 0
	}
	d.set, d.hosts = set, hosts
}

// begin starts the timeout.
func (d *Reader) begin(now time.Time) {
	d.progress = progress{giveUp: now.Add(d.timeout), owed: enough}
}

// arrived notes that bytes came. It fails when too few did in the time set.
func (d *Reader) arrived(n int) error {
	now := time.Now()
	if d.owed -= int64(n); d.owed <= 0 {
		d.begin(now)
	} else if now.After(d.giveUp) {
		return errSlow
	}
	d.stall.Reset(d.patience(now))
	return nil
}

// patience is how long nothing may arrive.
func (d *Reader) patience(now time.Time) time.Duration {
	return min(d.repo.client.opts.StallTimeout, max(d.giveUp.Sub(now), d.lastAttempt()))
}

// lastAttempt is how long before a fetch is given up the last attempt begins.
func (d *Reader) lastAttempt() time.Duration { return min(time.Second, d.timeout/8) }

// Host is the registry host that the last bytes came from.
func (d *Reader) Host() string { return d.served }

// Read returns the next bytes of the range and io.EOF behind its last.
func (d *Reader) Read(p []byte) (int, error) {
	if d.rg.Length == 0 {
		return 0, io.EOF
	}
	if !d.idle.IsZero() {
		d.giveUp = d.giveUp.Add(time.Since(d.idle)) // that time was not the registry's
	}
	n, err := d.read(p[:min(int64(len(p)), d.rg.Length)])
	d.idle = time.Now()
	return n, err
}

func (d *Reader) read(p []byte) (int, error) {
	for {
		if d.body == nil {
			if err := d.connect(); err != nil {
				return 0, err
			}
		}
		n, err := d.body.Read(p)
		if n > 0 {
			d.rg.Offset += int64(n)
			d.rg.Length -= int64(n)
			d.repo.count(0, int64(n))
			if d.rg.Length == 0 {
				d.closeBody()
				return n, nil
			}
			if serr := d.arrived(n); serr != nil {
				err = serr
			}
		}
		if err != nil {
			d.broken(err)
			if cerr := d.ctx.Err(); cerr != nil {
				return n, cerr
			}
		}
		if n > 0 || len(p) == 0 {
			return n, nil
		}
	}
}

// broken notes what ended a body.
func (d *Reader) broken(err error) {
	err = d.bodyError(err)
	d.closeBody()
	if s := &d.state[d.host]; s.err == nil || !errors.Is(err, errSlow) { // what kept it from coming before says more
		s.err = transportError(d.served, err)
	}
	d.hosts[d.host].silent()
	d.host++ // another host may have a better line
}

// bodyError says what broke a body off.
func (d *Reader) bodyError(err error) error {
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("the answer broke off: %w", io.ErrUnexpectedEOF)
	case errors.Is(err, context.Canceled) && d.ctx.Err() == nil:
		return errStalled
	}
	return err
}

func (d *Reader) closeBody() {
	if d.body != nil {
		d.stall.Stop()
		d.body.Close()
		d.stop()
		d.body = nil
	}
}

// Close ends the fetch.
func (d *Reader) Close() error {
	d.closeBody()
	return nil
}

// connect tries host after host, and all of them again with growing waits, until
// one answers with the range's beginning.
func (d *Reader) connect() error {
	for {
		for ; d.host < len(d.hosts); d.host++ {
			h := d.hosts[d.host]
			if d.state[d.host].refused() || h.busy(d.giveUp.Add(-d.lastAttempt())) || d.first() && h.down() {
				continue
			}
			err := d.try(h)
			if err == nil {
				return nil
			}
			if cerr := d.ctx.Err(); cerr != nil {
				return cerr
			}
			log.G(d.ctx).WithError(err).WithField("content", describe(d.kind, d.rg.Digest)).Debug("registry host failed")
			if d.failed(err) {
				d.host-- // once more
			}
		}
		d.host = 0
		if !slices.ContainsFunc(d.state, func(s standing) bool { return !s.refused() }) {
			return d.fail()
		}
		if err := d.backoff(); err != nil {
			return err
		}
	}
}

// first reports whether there may be a better host than one that does not answer.
func (d *Reader) first() bool { return d.round == 0 && len(d.hosts) > 1 && d.rg.Avoid == "" }

// failed notes a host's failure. It reports whether the host should be tried
// again at once, because what this node knows of it was read anew.
func (d *Reader) failed(err *Error) (again bool) {
	s := &d.state[d.host]
	if err.oddity && !s.warned {
		s.warned, err.temporary = true, true
	}
	if s.err == nil || !err.hasty {
		s.err = err
	}
	if !err.stale || d.renewed && !err.temporary {
		return false
	}
	set, rerr := d.repo.renew(d.set)
	if rerr != nil {
		log.G(d.ctx).WithError(rerr).Warn("registry configuration not read anew")
		return false
	}
	at := d.host
	d.use(set)
	if d.renewed {
		return false
	}
	d.renewed = true
	if d.host != at || d.state[at].err != err { // other hosts: begin with the first
		d.host = 0
		return true
	}
	s.err = nil
	return true
}

func (d *Reader) fail() error {
	var errs []*Error
	for _, s := range d.state {
		if s.err != nil {
			errs = append(errs, s.err)
		}
	}
	return failure(describe(d.kind, d.rg.Digest), errs)
}

// backoff waits before the hosts are tried again: longer each time, never the
// same for two, and no less than they asked for. The last attempt is just before
// the fetch is given up; behind it, backoff fails.
func (d *Reader) backoff() error {
	now := time.Now()
	left := d.giveUp.Sub(now) - d.lastAttempt()
	if left <= 0 {
		return d.fail()
	}
	wait := d.repo.client.opts.Backoff << min(d.round, 5)
	jitter := rand.N(wait / 2)
	d.round++
	asked := left
	for i, h := range d.hosts {
		if !d.state[i].refused() {
			asked = min(asked, h.freeIn(now))
		}
	}
	t := time.NewTimer(min(max(wait, asked)+jitter, left))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-d.ctx.Done():
		return d.ctx.Err()
	}
}
