// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Blob seals and opens the chunks of one page blob. Safe for concurrent use.
type Blob struct {
	key  Key
	aead cipher.AEAD
}

// NewBlob returns what seals with a key, which must be the key of no other blob.
func NewBlob(key Key) *Blob { return &Blob{key: key, aead: newAEAD(key[:])} }

// Key is the blob's key.
func (b *Blob) Key() Key { return b.key }

const chunkDomain = "thaw page chunk v1\x00"

// place is what a chunk's seal binds it to: its number in the blob, of which the nonce is
// made, the length of what is sealed, and the number of pages that it holds.
func place(chunk int, size int, pages uint32) (nonce [nonceSize]byte, bound []byte) {
	binary.LittleEndian.PutUint64(nonce[nonceSize-8:], uint64(chunk))
	bound = make([]byte, 0, len(chunkDomain)+16)
	bound = append(bound, chunkDomain...)
	bound = binary.LittleEndian.AppendUint64(bound, uint64(chunk))
	bound = binary.LittleEndian.AppendUint32(bound, uint32(size))
	bound = binary.LittleEndian.AppendUint32(bound, pages)
	return nonce, bound
}

// Seal appends a sealed frame to dst: that of the blob's chunk with this number, which
// holds so many pages. It must be called once for each number.
func (b *Blob) Seal(dst, frame []byte, chunk int, pages uint32) []byte {
	nonce, bound := place(chunk, len(frame), pages)
	return b.aead.Seal(dst, nonce[:], frame, bound)
}

// Open opens a sealed chunk in place and returns the frame. Errors wrap ErrSealed;
// after one the content of sealed is undefined.
func (b *Blob) Open(sealed []byte, chunk int, pages uint32) ([]byte, error) {
	if len(sealed) < Overhead {
		return nil, fmt.Errorf("%w: chunk %d has %d bytes", ErrSealed, chunk, len(sealed))
	}
	nonce, bound := place(chunk, len(sealed)-Overhead, pages)
	frame, err := b.aead.Open(sealed[:0], nonce[:], sealed, bound)
	if err != nil {
		return nil, fmt.Errorf("%w: chunk %d", ErrSealed, chunk)
	}
	return frame, nil
}

// CacheKey names the opened content of a blob, given what names its sealed content.
// Who does not have the key cannot come to this name, whatever they list of the blob's
// digests.
func (b *Blob) CacheKey(content string) string {
	h := sha256.New()
	h.Write([]byte("thaw page store, sealed v1\x00"))
	h.Write(b.key[:])
	h.Write([]byte(content))
	return hex.EncodeToString(h.Sum(nil))
}
