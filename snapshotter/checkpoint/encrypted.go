// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"maps"

	"thaw.dev/thaw/snapshotter/seal/wrap"
)

// takeKeys takes the wrapped key, which state and page index have both.
func (i *Image) takeKeys() error {
	keys, err := wrap.Annotations(i.PageIndex.Annotations)
	if err != nil {
		return fmt.Errorf("%w: page index: %w", ErrFormat, err)
	}
	again, err := wrap.Annotations(i.State.Annotations)
	if err != nil {
		return fmt.Errorf("%w: state: %w", ErrFormat, err)
	}
	if !maps.Equal(keys, again) {
		return fmt.Errorf("%w: state and page index are encrypted with different keys", ErrFormat)
	}
	i.Keys = keys
	return nil
}
