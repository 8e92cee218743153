// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package guard

import (
	"os"
	"reflect"
	"unsafe"
)

// uselessMemory returns what lies between the program and its arguments: Go's heap and
// whatever was mapped. A guard that kept it would keep the old content of what this
// process changes, and the files that it maps. Nothing is useless if the program was
// linked to be anywhere.
func uselessMemory() useless {
	const low = 4 << 30
	arguments := uintptr(unsafe.Pointer(unsafe.SliceData(title))) &^ (uintptr(os.Getpagesize()) - 1)
	if code := reflect.ValueOf(clone).Pointer(); unsafe.Sizeof(code) < 8 || code >= low || arguments < low {
		return useless{}
	}
	return useless{low, arguments}
}
