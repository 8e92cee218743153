// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"encoding/binary"
	"fmt"
)

const (
	keysMagic  = "THAWKEYS"
	keysHeader = len(keysMagic) + 4
)

// JoinKeys puts the keys of an index's page blobs in front of the index. The result is
// what is sealed as PageIndex.
func JoinKeys(blobs []*Blob, index []byte) []byte {
	out := make([]byte, 0, keysHeader+len(blobs)*KeySize+len(index))
	out = append(out, keysMagic...)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(blobs)))
	for _, b := range blobs {
		out = append(out, b.key[:]...)
	}
	return append(out, index...)
}

// SplitKeys undoes JoinKeys. The index lies in the input. Errors wrap ErrFormat.
func SplitKeys(p []byte) (blobs []*Blob, index []byte, err error) {
	if len(p) < keysHeader || string(p[:len(keysMagic)]) != keysMagic {
		return nil, nil, fmt.Errorf("%w: the page index has no keys", ErrFormat)
	}
	n := uint64(binary.LittleEndian.Uint32(p[len(keysMagic):]))
	p = p[keysHeader:]
	if n > uint64(len(p))/KeySize {
		return nil, nil, fmt.Errorf("%w: %d keys do not fit into the page index", ErrFormat, n)
	}
	known := make(map[Key]struct{}, n)
	for ; n > 0; n-- {
		k := Key(p[:KeySize])
		if _, ok := known[k]; ok {
			return nil, nil, fmt.Errorf("%w: two page blobs have one key", ErrFormat)
		}
		known[k] = struct{}{}
		blobs = append(blobs, NewBlob(k))
		p = p[KeySize:]
	}
	return blobs, p, nil
}
