// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bufio"
	"bytes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Purpose keeps streams of the same checkpoint apart: none opens as another.
type Purpose string

// What is sealed as a stream.
const (
	State     Purpose = "thaw state v1"
	PageIndex Purpose = "thaw page index v1"
)

const (
	magic      = "THAWSEAL"
	major      = 1
	saltSize   = 32
	headerSize = len(magic) + 2 + 2 + saltSize

	// segmentSize is how much is sealed at once, and so what a reader holds.
	segmentSize = 64 << 10
)

// stream is what both ends have in common.
type stream struct {
	aead   cipher.AEAD
	header []byte
	next   uint64 // number of the next segment
}

func newStream(key Key, purpose Purpose, header []byte) (*stream, error) {
	k, err := hkdf.Key(sha256.New, key[:], header[headerSize-saltSize:], string(purpose), KeySize)
	if err != nil {
		return nil, err
	}
	return &stream{aead: newAEAD(k), header: header}, nil
}

// nonce is that of the next segment. The last one's differs, so that a stream cannot be cut short.
func (s *stream) nonce(last bool) []byte {
	var n [nonceSize]byte
	if last {
		n[0] = 1
	}
	binary.LittleEndian.PutUint64(n[nonceSize-8:], s.next)
	s.next++
	return n[:]
}

// NewWriter returns a writer that seals what it is given and writes that to w. Close
// writes the end, without which the stream does not open, and does not close w.
func NewWriter(w io.Writer, key Key, purpose Purpose) (io.WriteCloser, error) {
	header := make([]byte, 0, headerSize)
	header = append(header, magic...)
	header = binary.LittleEndian.AppendUint16(header, major)
	header = binary.LittleEndian.AppendUint16(header, 0)
	header = header[:headerSize]
	rand.Read(header[headerSize-saltSize:]) // never fails
	s, err := newStream(key, purpose, header)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(header); err != nil {
		return nil, err
	}
	return &writer{stream: s, w: w, plain: make([]byte, 0, segmentSize)}, nil
}

type writer struct {
	*stream
	w      io.Writer
	plain  []byte // of the segment that is being filled
	sealed []byte
	err    error
}

var errClosed = errors.New("sealed stream is closed")

func (w *writer) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if len(w.plain) == segmentSize {
			w.flush(false) // more comes: it is not the last
		}
		if w.err != nil {
			return n, w.err
		}
		k := copy(w.plain[len(w.plain):segmentSize], p)
		w.plain = w.plain[:len(w.plain)+k]
		p, n = p[k:], n+k
	}
	return n, w.err
}

func (w *writer) flush(last bool) {
	if w.err != nil {
		return
	}
	w.sealed = w.aead.Seal(w.sealed[:0], w.nonce(last), w.plain, w.header)
	w.plain = w.plain[:0]
	_, w.err = w.w.Write(w.sealed)
}

func (w *writer) Close() error {
	if errors.Is(w.err, errClosed) {
		return nil
	}
	w.flush(true)
	err := w.err
	w.err = errClosed
	return err
}

// NewReader returns a reader of what was sealed. Nothing is returned of a segment
// before all of it was found to be as it was sealed. Errors about the content wrap
// ErrSealed or ErrFormat.
func NewReader(r io.Reader, key Key, purpose Purpose) (io.Reader, error) {
	header := make([]byte, headerSize)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, short(err)
	}
	if string(header[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: it does not begin with %s", ErrFormat, magic)
	}
	if v := binary.LittleEndian.Uint16(header[len(magic):]); v != major {
		return nil, fmt.Errorf("%w: version %d is not supported (this thaw reads version %d): use a thaw that knows it", ErrFormat, v, major)
	}
	s, err := newStream(key, purpose, header)
	if err != nil {
		return nil, err
	}
	return &reader{stream: s, in: bufio.NewReaderSize(r, segmentSize), sealed: make([]byte, segmentSize+Overhead)}, nil
}

func short(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: it ends too early", ErrFormat)
	}
	return err
}

type reader struct {
	*stream
	in     *bufio.Reader
	sealed []byte
	plain  []byte // opened and not read yet
	err    error  // behind it
}

func (r *reader) Read(p []byte) (int, error) {
	for len(r.plain) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		r.plain, r.err = r.segment()
	}
	n := copy(p, r.plain)
	r.plain = r.plain[n:]
	return n, nil
}

// segment opens the next segment. With the last one it returns io.EOF.
func (r *reader) segment() ([]byte, error) {
	n, err := io.ReadFull(r.in, r.sealed)
	last := errors.Is(err, io.ErrUnexpectedEOF)
	if err == nil {
		_, err = r.in.Peek(1)
		last = errors.Is(err, io.EOF)
	}
	if err != nil && !last {
		return nil, short(err)
	}
	if n < Overhead {
		return nil, short(io.EOF)
	}
	number := r.next
	plain, err := r.aead.Open(r.sealed[:0], r.nonce(last), r.sealed[:n], r.header)
	if err != nil {
		return nil, fmt.Errorf("%w: segment %d", ErrSealed, number)
	}
	if last {
		return plain, io.EOF
	}
	return plain, nil
}

// Bytes seals what is in memory.
func Bytes(p []byte, key Key, purpose Purpose) ([]byte, error) {
	var out bytes.Buffer
	w, err := NewWriter(&out, key, purpose)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(p); err != nil {
		return nil, err
	}
	err = w.Close()
	return out.Bytes(), err
}

// Open opens what Bytes returned.
func Open(sealed []byte, key Key, purpose Purpose) ([]byte, error) {
	r, err := NewReader(bytes.NewReader(sealed), key, purpose)
	if err != nil {
		return nil, err
	}
	out := bytes.NewBuffer(make([]byte, 0, len(sealed)+bytes.MinRead))
	_, err = out.ReadFrom(r)
	return out.Bytes(), err
}
