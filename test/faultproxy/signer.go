// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"net/http"
	"strconv"
	"sync/atomic"
)

// Signer moves content to a storage whose addresses are signed and expire. The storage is a proxy of its own, which has
// Check among its faults; the registry's proxy has Redirect.
type Signer struct {
	storage    string // its URL
	generation atomic.Int64
	issued     atomic.Int64
}

// Secret is in each signed address; it belongs in no log and no error.
const Secret = "hush-hush"

// NewSigner signs addresses of the storage at a URL.
func NewSigner(storage string) *Signer { return &Signer{storage: storage} }

// Redirect is the fault that sends a client to the storage.
func (s *Signer) Redirect(w http.ResponseWriter, r *http.Request, _ http.Handler) {
	s.issued.Add(1)
	to := s.storage + r.URL.Path + "?signature=" + Secret + "&expires=" + strconv.FormatInt(s.generation.Load(), 10)
	http.Redirect(w, r, to, http.StatusTemporaryRedirect)
}

// Check is the storage's fault: expired addresses and requests other than GET, for which none was signed, are refused,
// and so are credentials, as object stores do that find two kinds of them.
func (s *Signer) Check(w http.ResponseWriter, r *http.Request, next http.Handler) {
	q := r.URL.Query()
	switch {
	case r.Header.Get("Authorization") != "":
		w.WriteHeader(http.StatusBadRequest)
	case r.Method != http.MethodGet, q.Get("signature") != Secret, q.Get("expires") != strconv.FormatInt(s.generation.Load(), 10):
		w.WriteHeader(http.StatusForbidden)
	default:
		next.ServeHTTP(w, r)
	}
}

// Expire makes all addresses that were handed out so far expire.
func (s *Signer) Expire() { s.generation.Add(1) }

// Issued is how many addresses were handed out.
func (s *Signer) Issued() int { return int(s.issued.Load()) }
