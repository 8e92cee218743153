// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pidns"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/utsns"
	"google.golang.org/protobuf/proto"
)

// Hostname returns the host name in a UTS namespace (IDs.UtsNS); "" if it was
// not dumped.
func (d *Dir) Hostname(ns uint32) (string, error) {
	e := &utsns.UtsnsEntry{}
	_, err := d.one(fmt.Sprintf("utsns-%d.img", ns), magicUTS, e)
	return e.GetNodename(), err
}

// NetKey returns the key under which a network namespace (IDs.NetNS) has to be
// given at the restore. found is false if CRIU does not restore the namespace at
// all; an empty key means that CRIU makes it from the images. With a key there is
// nothing else to say about the namespace: it is set up by others.
func (d *Dir) NetKey(ns uint32) (key string, found bool, err error) {
	e := &netdev.NetnsEntry{}
	found, err = d.one(fmt.Sprintf("netns-%d.img", ns), magicNetNS, e)
	key = e.GetExtKey()
	if e.ExtKey = nil; err == nil && key != "" && proto.Size(e) > 0 {
		err = fmt.Errorf("%w: netns-%d.img has settings (sysctls) for a network namespace that others set up", ErrFormat, ns)
	}
	return key, found, err
}

// PidKey is as NetKey for a PID namespace (IDs.PidNS).
func (d *Dir) PidKey(ns uint32) (key string, found bool, err error) {
	e := &pidns.PidnsEntry{}
	found, err = d.one(fmt.Sprintf("pidns-%d.img", ns), magicPidNS, e)
	return e.GetExtKey(), found, err
}
