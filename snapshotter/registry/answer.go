// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxSkip bounds what is read and thrown away when a host ignores ranges
// and sends the blob from its beginning.
const maxSkip = 16 << 20

// check makes sure that the body is what was asked for and moves it to the
// range's beginning.
func (d *Reader) check(host *host, resp *http.Response) *Error {
	if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return wrong(host.Host, "answer in encoding %.40q that was not asked for", enc)
	}
	if resp.StatusCode == http.StatusPartialContent {
		err := d.checkPartial(host, resp)
		if err == nil {
			host.ranges.Store(rangesServed)
		}
		return err
	}
	if n := resp.ContentLength; n >= 0 && n != d.rg.Size {
		return wrong(host.Host, "%d bytes instead of %d", n, d.rg.Size)
	}
	if d.ranged() {
		host.ranges.CompareAndSwap(rangesUnknown, rangesIgnored)
	}
	if d.rg.Offset == 0 {
		return nil
	}
	if d.rg.Offset > maxSkip {
		return noRanges(host.Host)
	}
	before := d.progress
	n, err := io.CopyN(io.Discard, skipped{d, resp.Body}, d.rg.Offset)
	d.repo.count(0, n)
	// That nothing that is wanted came yet is no progress, however much was skipped.
	now := time.Now()
	if d.progress = before; err == nil && d.giveUp.Before(now) {
		d.giveUp = now.Add(d.lastAttempt())
	}
	if err != nil {
		return transportError(host.Host, d.bodyError(err))
	}
	return nil
}

// skipped is the part of a body before what is wanted.
type skipped struct {
	d *Reader
	r io.Reader
}

func (s skipped) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if n > 0 {
		if serr := s.d.arrived(n); serr != nil {
			err = serr
		}
	}
	return n, err
}

// checkPartial checks a 206 (RFC 9110, 15.3.7).
func (d *Reader) checkPartial(host *host, resp *http.Response) *Error {
	if !d.ranged() {
		return wrong(host.Host, "HTTP status 206 for a whole manifest")
	}
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t == "multipart/byteranges" {
		return wrong(host.Host, "several ranges where one was asked for")
	}
	first, last, total, ok := parseContentRange(resp.Header.Get("Content-Range"))
	switch {
	case !ok:
		return wrong(host.Host, "HTTP status 206 without a valid Content-Range")
	case first != d.rg.Offset || last < first || last >= d.rg.Offset+d.rg.Length:
		return wrong(host.Host, "bytes %d-%d instead of %d-%d", first, last, d.rg.Offset, d.rg.Offset+d.rg.Length-1)
	case total >= 0 && total != d.rg.Size:
		return wrong(host.Host, "%d bytes in all instead of %d", total, d.rg.Size)
	case resp.ContentLength >= 0 && resp.ContentLength != last-first+1:
		return wrong(host.Host, "%d bytes for a range of %d", resp.ContentLength, last-first+1)
	}
	return nil
}

// parseContentRange parses "bytes 0-9/100"; total is -1 for "*".
func parseContentRange(s string) (first, last, total int64, ok bool) {
	rest, ok := strings.CutPrefix(s, "bytes ")
	span, all, ok2 := strings.Cut(rest, "/")
	a, b, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		return 0, 0, 0, false
	}
	var err error
	if first, err = parseNumber(a); err != nil {
		return 0, 0, 0, false
	}
	if last, err = parseNumber(b); err != nil {
		return 0, 0, 0, false
	}
	if all == "*" {
		return first, last, -1, true
	}
	total, err = parseNumber(all)
	return first, last, total, err == nil
}

func parseNumber(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	return int64(n), err
}

// parseRetryAfter reads both forms of the header (RFC 9110, 10.2.3).
func parseRetryAfter(s string) time.Duration {
	if s == "" {
		return 0
	}
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(s); err == nil {
		return max(time.Until(t), 0)
	}
	return 0
}

// drain reads what is left of a small body so that the connection can be used
// again.
func drain(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, maxErrorBody)
	resp.Body.Close()
}
