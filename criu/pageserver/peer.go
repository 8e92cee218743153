// SPDX-License-Identifier: Apache-2.0

package pageserver

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// sameUser refuses clients on this machine that are of another user: pages hold
// whatever secrets the processes had in memory. Those of other machines pass.
func sameUser(conn *net.TCPConn) error {
	peer, here, err := addresses(conn)
	if err != nil {
		return err
	}
	if !peer.Addr().IsLoopback() {
		return nil
	}
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(table)
		if errors.Is(err, os.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return fmt.Errorf("user of the client: %w", err)
		}
		uid, err := ownerOf(f, peer, here)
		f.Close()
		switch {
		case errdefs.IsNotFound(err):
			continue
		case err != nil:
			return err
		case uid != uint32(os.Geteuid()):
			return fmt.Errorf("client is of user %d, allowed is %d: %w", uid, os.Geteuid(), errdefs.ErrPermissionDenied)
		}
		return nil
	}
	return fmt.Errorf("user of the client: %w", errdefs.ErrNotFound)
}

func addresses(conn *net.TCPConn) (peer, here netip.AddrPort, err error) {
	p, ok1 := conn.RemoteAddr().(*net.TCPAddr)
	h, ok2 := conn.LocalAddr().(*net.TCPAddr)
	if !ok1 || !ok2 {
		return peer, here, errGone
	}
	return unmapped(p.AddrPort()), unmapped(h.AddrPort()), nil
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// established is the state of a connection that its owner has not closed: of
// others the kernel does not say the owner (include/net/tcp_states.h).
const established = "01"

// ownerOf finds in one of the kernel's tables (proc_net_tcp(5)) the user whose
// socket has these addresses.
func ownerOf(table io.Reader, local, remote netip.AddrPort) (uid uint32, err error) {
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != established {
			continue
		}
		if a, err := parseAddress(f[1]); err != nil || a != local {
			continue
		}
		if a, err := parseAddress(f[2]); err != nil || a != remote {
			continue
		}
		n, err := strconv.ParseUint(f[7], 10, 32)
		if err != nil {
			return 0, fmt.Errorf("user of the client: %w", err)
		}
		return uint32(n), nil
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("user of the client: %w", err)
	}
	return 0, errdefs.ErrNotFound
}

// parseAddress reads an address of the kernel's tables: words of four bytes in the
// machine's order in hex, a colon, the port in hex.
func parseAddress(s string) (netip.AddrPort, error) {
	words, port, _ := strings.Cut(s, ":")
	p, err := hex.DecodeString(words)
	if err != nil || len(p)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("address %.60q: %w", s, errdefs.ErrInvalidArgument)
	}
	for i := 0; i < len(p); i += 4 {
		binary.NativeEndian.PutUint32(p[i:], binary.BigEndian.Uint32(p[i:]))
	}
	a, ok := netip.AddrFromSlice(p)
	n, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil {
		return netip.AddrPort{}, fmt.Errorf("address %.60q: %w", s, errdefs.ErrInvalidArgument)
	}
	return unmapped(netip.AddrPortFrom(a, uint16(n))), nil
}
