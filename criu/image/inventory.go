// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"google.golang.org/protobuf/encoding/protowire"
)

// Inventory describes a dump as a whole.
type Inventory struct {
	// Root are the kernel objects of CRIU itself at the dump: a task that
	// shares a namespace with it was in the host's.
	Root IDs
	// LSM is the security module of the host: "none", "selinux" or "apparmor".
	LSM string
	// TCPClose is true if connections were dropped at the dump; CRIU then needs
	// its option tcp-close at the restore.
	TCPClose bool
	// Plugins are the CRIU plugins that the restore needs, e.g. for a GPU.
	Plugins []string
	// AllowUprobes is true if CRIU needs its option allow-uprobes.
	AllowUprobes bool
}

// Numbers of fields in inventory_entry that go-criu's type lacks.
const (
	inventoryPlugins = 12 // plugins_entry: repeated string plugins = 12
	inventoryUprobes = 14 // bool
)

var errNoInventory = fmt.Errorf("%w: inventory.img is missing", ErrFormat)

// imageVersion is CRIU's image format 1.1 (CRTOOLS_IMAGES_V1_1), the only one
// since CRIU 2.0.
const imageVersion = 2

// Inventory reads inventory.img, without which no directory holds a dump.
func (d *Dir) Inventory() (*Inventory, error) {
	const name = "inventory.img"
	e := &inventory.InventoryEntry{}
	found, err := d.one(name, magicInventory, e)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, errNoInventory
	}
	if v := e.GetImgVersion(); v != imageVersion || !e.GetFdinfoPerId() || !e.GetNsPerId() {
		return nil, fmt.Errorf("%w: %s has image version %d, thaw reads version %d as CRIU 4.1 and later write it", ErrFormat, name, v, imageVersion)
	}
	inv := &Inventory{TCPClose: e.GetTcpClose(), LSM: "none"}
	switch e.GetLsmtype() {
	case inventory.Lsmtype_SELINUX:
		inv.LSM = "selinux"
	case inventory.Lsmtype_APPARMOR:
		inv.LSM = "apparmor"
	}
	if e.RootIds != nil {
		inv.Root = idsOf(e.RootIds)
	}
	uprobes, err := varints(e, inventoryUprobes)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrFormat, name, err)
	}
	inv.AllowUprobes = len(uprobes) > 0 && uprobes[len(uprobes)-1] != 0
	for _, p := range byteFields(e.ProtoReflect().GetUnknown(), inventoryPlugins) {
		for _, s := range byteFields(p, inventoryPlugins) {
			inv.Plugins = append(inv.Plugins, string(s))
		}
	}
	return inv, nil
}

// byteFields returns the values of a length-delimited field in an encoded
// message. Anything malformed ends the list.
func byteFields(in []byte, field protowire.Number) [][]byte {
	var out [][]byte
	for len(in) > 0 {
		num, typ, n := protowire.ConsumeTag(in)
		if n < 0 {
			return out
		}
		in = in[n:]
		n = protowire.ConsumeFieldValue(num, typ, in)
		if n < 0 {
			return out
		}
		if num == field && typ == protowire.BytesType {
			v, _ := protowire.ConsumeBytes(in)
			out = append(out, v)
		}
		in = in[n:]
	}
	return out
}
