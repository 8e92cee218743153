// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"fmt"
	"net/http"
	"sync"
)

// Tokens makes a registry ask for bearer tokens, and issues them at the same address below /token.
type Tokens struct {
	mu         sync.Mutex
	generation int
	issued     int
	denying    bool
	trouble    Fault
	status     int
}

// NewTokens refuses requests without a valid token with status 401.
func NewTokens() *Tokens { return &Tokens{status: http.StatusUnauthorized} }

// Guard is the fault.
func (t *Tokens) Guard(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if r.URL.Path == "/token" {
		t.issue(w, r)
		return
	}
	t.mu.Lock()
	valid, status := fmt.Sprintf("Bearer token-%d", t.generation), t.status
	denying := t.denying
	t.mu.Unlock()
	auth := r.Header.Get("Authorization")
	if auth == valid && !denying {
		next.ServeHTTP(w, r)
		return
	}
	if auth == "" || status == http.StatusUnauthorized {
		status = http.StatusUnauthorized
		challenge := fmt.Sprintf(`Bearer realm="http://%s/token",service="registry",scope="repository:x:pull"`, r.Host)
		if auth != "" {
			challenge += `,error="invalid_token"`
		}
		w.Header().Set("WWW-Authenticate", challenge)
	}
	w.WriteHeader(status)
}

func (t *Tokens) issue(w http.ResponseWriter, r *http.Request) {
	t.mu.Lock()
	t.issued++
	token, trouble := fmt.Sprintf("token-%d", t.generation), t.trouble
	t.mu.Unlock()
	answer := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"token":%q,"expires_in":300}`, token)
	})
	if trouble != nil {
		trouble(w, r, answer)
		return
	}
	answer(w, r)
}

// Revoke makes all tokens so far invalid, though they said that they would be good for longer. Requests with such a
// token get the status, 401 or 403: registries differ.
func (t *Tokens) Revoke(status int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.generation++
	t.status = status
}

// Deny refuses all tokens, or does not any more.
func (t *Tokens) Deny(yes bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.denying = yes
}

// Trouble has a fault for requests for tokens; nil is none.
func (t *Tokens) Trouble(f Fault) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trouble = f
}

// Issued is how often a token was asked for.
func (t *Tokens) Issued() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.issued
}
