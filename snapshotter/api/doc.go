// SPDX-License-Identifier: Apache-2.0

// Package api is the protocol between the node daemon and its clients: the shims
// and the thaw command.
package api

//go:generate protoc --go_out=. --go_opt=paths=source_relative --go-ttrpc_out=. --go-ttrpc_opt=paths=source_relative node.proto pages.proto
