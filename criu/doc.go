// SPDX-License-Identifier: Apache-2.0

// Package criu is what thaw knows of the program criu as a whole: where it is and
// which version, what it and the node must be able to do, the options of a
// restore, and the errors in its log.
//
// Its images are package image; whether they may run under a pod's spec is
// package admit.
package criu
