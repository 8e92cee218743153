// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"fmt"
	"slices"

	pb "github.com/checkpoint-restore/go-criu/v7/crit/images/creds"
)

// Capabilities is a set of capabilities: bit n is the one with number n in
// linux/capability.h.
type Capabilities uint64

// Creds are a thread's credentials, see credentials(7) and capabilities(7).
type Creds struct {
	UID, EUID, SUID, FSUID uint32
	GID, EGID, SGID, FSGID uint32
	Groups                 []uint32 // supplementary groups

	Bounding, Permitted, Effective, Inheritable, Ambient Capabilities

	SecureBits uint32 // as in linux/securebits.h
	NoNewPrivs bool
	// LSMProfile is the AppArmor profile or the SELinux label, "" if there was
	// none.
	LSMProfile string
	// LSMSockCreate is the SELinux label of new sockets.
	LSMSockCreate string
}

// UIDs returns the different user IDs in c.
func (c *Creds) UIDs() []uint32 { return distinct(c.UID, c.EUID, c.SUID, c.FSUID) }

// GIDs returns the different primary group IDs in c, without the supplementary
// groups.
func (c *Creds) GIDs() []uint32 { return distinct(c.GID, c.EGID, c.SGID, c.FSGID) }

// maxGroups is the kernel's limit of supplementary groups (NGROUPS_MAX).
const maxGroups = 1 << 16

func distinct(ids ...uint32) []uint32 {
	slices.Sort(ids)
	return slices.Compact(ids)
}

func creds(e *pb.CredsEntry) (Creds, error) {
	if e.Uid == nil || e.Gid == nil || e.Euid == nil || e.Egid == nil || e.Suid == nil || e.Sgid == nil ||
		e.Fsuid == nil || e.Fsgid == nil || e.Secbits == nil {
		return Creds{}, errors.New("credentials are not complete")
	}
	c := Creds{
		UID: e.GetUid(), EUID: e.GetEuid(), SUID: e.GetSuid(), FSUID: e.GetFsuid(),
		GID: e.GetGid(), EGID: e.GetEgid(), SGID: e.GetSgid(), FSGID: e.GetFsgid(),
		Groups:     e.GetGroups(),
		SecureBits: e.GetSecbits(), LSMProfile: e.GetLsmProfile(), LSMSockCreate: e.GetLsmSockcreate(),
	}
	if len(c.Groups) > maxGroups {
		return Creds{}, fmt.Errorf("more than %d groups", maxGroups)
	}
	ambient, err := varints(e, credsAmbient)
	if err != nil {
		return Creds{}, err
	}
	amb := make([]uint32, 0, 2)
	for _, v := range ambient {
		amb = append(amb, uint32(v))
	}
	for _, set := range []struct {
		name  string
		words []uint32
		to    *Capabilities
	}{
		{"inheritable", e.GetCapInh(), &c.Inheritable},
		{"permitted", e.GetCapPrm(), &c.Permitted},
		{"effective", e.GetCapEff(), &c.Effective},
		{"bounding", e.GetCapBnd(), &c.Bounding},
		{"ambient", amb, &c.Ambient},
	} {
		// CRIU copies the words it finds into an array of two
		// (criu/cr-restore.c): more must not reach it.
		switch {
		case len(set.words) == 2:
			*set.to = Capabilities(set.words[1])<<32 | Capabilities(set.words[0])
		case len(set.words) == 0 && set.name == "ambient": // before CRIU 4.1
		default:
			return Creds{}, fmt.Errorf("%s capabilities have %d words, 2 belong there", set.name, len(set.words))
		}
	}
	nnp, err := varints(e, credsNoNewPrivs)
	if err != nil {
		return Creds{}, err
	}
	// The last one wins, as for every protobuf decoder.
	c.NoNewPrivs = len(nnp) > 0 && uint32(nnp[len(nnp)-1]) != 0
	return c, nil
}
