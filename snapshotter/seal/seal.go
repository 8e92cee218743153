// SPDX-License-Identifier: Apache-2.0

// Package seal encrypts what a checkpoint image holds of a process's memory, so that
// the registry stores none of its secrets. docs/image-format.md ("Encryption") specifies
// what this package writes.
//
// There are two forms, both AES-256-GCM. A Blob seals the chunks of one page blob, each
// alone, so that one can be fetched and opened without the others. NewWriter and
// NewReader seal a stream in segments: the state and the page index.
//
// Keys are never used for two things: the key of a page blob is random and made for it
// alone, that of a stream is derived from the checkpoint's key and a random salt. So
// nonces can be counters, and none comes twice. How the checkpoint's key reaches those
// who may open it is the business of package wrap.
package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
)

const (
	// KeySize is the size of all keys in bytes.
	KeySize = 32
	// Overhead is how many bytes longer a sealed chunk or segment is.
	Overhead = 16

	nonceSize = 12
)

// ErrSealed is wrapped by errors about sealed content that does not open: it is
// damaged, was changed, is in another place than it was made for, or the key is
// another.
var ErrSealed = errors.New("encrypted content does not open: it was changed, or its key is another")

// ErrFormat is wrapped by errors about content that is no sealed content, or of an
// unknown version.
var ErrFormat = errors.New("invalid encrypted content")

// Key is an AES-256 key.
type Key [KeySize]byte

// NewKey returns a random key.
func NewKey() (k Key) {
	rand.Read(k[:]) // never fails
	return k
}

// Format prints no key, however one gets into a message.
func (Key) Format(w fmt.State, _ rune) { io.WriteString(w, "[key]") }

func newAEAD(key []byte) cipher.AEAD {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic("AES key: " + err.Error()) // of KeySize bytes: cannot fail
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic("AES-GCM: " + err.Error()) // a block cipher of 128 bits: cannot fail
	}
	return aead
}
