// SPDX-License-Identifier: Apache-2.0

// Package image reads the images that CRIU wrote of a process tree: who the
// processes are, what privileges they had, which memory was dumped and where it
// lies, which files, sockets and mounts they used.
//
// Everything here treats the images as hostile: names are confined to one
// directory and never followed through a link, sizes are bounded before memory
// is taken, and a file that contradicts itself is an error rather than a guess.
// Errors about content wrap ErrFormat.
//
// CRIU's format: a file begins with one or two magic numbers, then come protobuf
// messages, each behind its length (https://criu.org/Images). The messages'
// types are those of go-criu; the fields that CRIU has gained since are read
// from the fields that those types do not know (see newer.go).
package image

import "errors"

// ErrFormat is wrapped by every error about the content of images: they are
// damaged, contradict themselves, or hold what this version cannot read.
var ErrFormat = errors.New("invalid CRIU image")
