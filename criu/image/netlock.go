// SPDX-License-Identifier: Apache-2.0

package image

import (
	"encoding/binary"
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"google.golang.org/protobuf/proto"
)

// lockSkip is CRIU's network lock method `skip` (criu/include/cr_options.h).
const lockSkip = 2

// SkipNetworkLock returns the content of inventory.img with which CRIU does not
// lock the network during the restore. The lock keeps packets of restored
// connections away until their sockets are there. A restore that closes all
// connections (option tcp-close) has none to protect, and what CRIU runs to
// set up and remove its firewall rules, five programs in turn, takes a third of the
// restore's time. CRIU takes the method from the inventory, whatever its options
// say.
func (d *Dir) SkipNetworkLock() ([]byte, error) {
	e := &inventory.InventoryEntry{}
	found, err := d.one("inventory.img", magicInventory, e)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, errNoInventory
	}
	e.NetworkLockMethod = proto.Uint32(lockSkip)
	m, err := proto.MarshalOptions{AllowPartial: true, Deterministic: true}.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode inventory.img: %w", err)
	}
	out := binary.LittleEndian.AppendUint32(nil, magicInventory)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(m)))
	return append(out, m...), nil
}
