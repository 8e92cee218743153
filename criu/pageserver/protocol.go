// SPDX-License-Identifier: Apache-2.0

package pageserver

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// PageSize is the size in bytes of the pages that requests count.
	PageSize = 4096

	// MaxPages is the most pages in one answer: 4 MiB, which is also the most
	// that CRIU asks for at once. A request for more is answered with so many.
	MaxPages = 1024

	// maxPID bounds process numbers (PID_MAX_LIMIT in the kernel).
	maxPID = 1 << 22

	// maxAddress is the end of the user part of an address space.
	maxAddress = 1 << 56
)

// Commands of the protocol, in the lower 16 bits of the first word; flags are in
// the upper ones.
const (
	commandAdd        = 6 // an answer: pages follow
	commandGet        = 7
	commandClose      = 0x1023
	commandForceClose = 0x1024

	commandMask = 1<<16 - 1

	// flagPresent says that the pages' content follows.
	flagPresent = 4 << 16
)

// ErrProtocol is wrapped by errors about what a client sent.
var ErrProtocol = errors.New("no request of CRIU's lazy-pages daemon")

// request is one message of a client. Answers have the same form.
type request struct {
	command uint32
	pages   uint64
	address uint64
	pid     uint64
}

// form is how a CRIU lays out its messages. It sends the C structure as it lies
// in memory, and a counter in it has become longer:
//
//	          compact (until 4.1)    wide (since 4.2)
//	command   0, 4 bytes             0, 4 bytes, 4 of padding
//	pages     4, 4 bytes             8, 8 bytes
//	address   8, 8 bytes             16, 8 bytes
//	process   16, 8 bytes            24, 8 bytes
//
// Nothing in a message says which one it is.
type form int

const (
	compact form = 24 // bytes in a message
	wide    form = 32
)

// formOf tells the form by the first bytes (compact) of a client's first
// message. Where the compact form has an address, which is never on the first
// page, the wide one has a number of pages, which CRIU keeps within MaxPages.
// Other messages than requests for pages look the same, but none follows them: of
// those, the shorter form is there in any case.
func formOf(p []byte) form {
	if binary.NativeEndian.Uint32(p)&commandMask == commandGet && binary.NativeEndian.Uint64(p[8:]) < PageSize {
		return wide
	}
	return compact
}

// parse reads a message, which has the form's length.
func (f form) parse(p []byte) (request, error) {
	r := request{command: binary.NativeEndian.Uint32(p) & commandMask}
	if f == compact {
		r.pages, p = uint64(binary.NativeEndian.Uint32(p[4:])), p[8:]
	} else {
		r.pages, p = binary.NativeEndian.Uint64(p[8:]), p[16:]
	}
	r.address, r.pid = binary.NativeEndian.Uint64(p), binary.NativeEndian.Uint64(p[8:])
	return r, r.check()
}

func (r request) check() error {
	switch {
	case r.command == commandClose || r.command == commandForceClose:
		return nil
	case r.command != commandGet:
		return fmt.Errorf("%w: command %d, but pages are only read here (for criu dump, run criu page-server)", ErrProtocol, r.command)
	case r.pid == 0 || r.pid > maxPID:
		return fmt.Errorf("%w: process %d", ErrProtocol, r.pid)
	case r.pages == 0:
		return fmt.Errorf("%w: no pages", ErrProtocol)
	case r.address%PageSize != 0 || r.address >= maxAddress:
		return fmt.Errorf("%w: address %#x", ErrProtocol, r.address)
	}
	return nil
}

// append adds the message to p.
func (f form) append(p []byte, r request) []byte {
	p = binary.NativeEndian.AppendUint32(p, r.command)
	if f == compact {
		p = binary.NativeEndian.AppendUint32(p, uint32(r.pages))
	} else {
		p = binary.NativeEndian.AppendUint32(p, 0)
		p = binary.NativeEndian.AppendUint64(p, r.pages)
	}
	p = binary.NativeEndian.AppendUint64(p, r.address)
	return binary.NativeEndian.AppendUint64(p, r.pid)
}
