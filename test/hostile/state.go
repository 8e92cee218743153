// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"strings"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"google.golang.org/protobuf/proto"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// entry puts an entry before all others of the state's archive.
func entry(h tar.Header, content ...byte) func(*Image) {
	h.Size = int64(len(content))
	return func(i *Image) { i.State = append([]Entry{{h, content}}, i.State...) }
}

// stateTricks are those of the archive with CRIU's images.
func stateTricks() []Trick {
	reg := byte(tar.TypeReg)
	return []Trick{
		{Name: "absolute-name", Make: entry(tar.Header{Typeflag: reg, Name: "/etc/cron.d/evil"}, 'x'), Says: `"/etc/cron.d/evil", which is no CRIU image`},
		{Name: "name-with-dots", Make: entry(tar.Header{Typeflag: reg, Name: "../core-1.img"}, 'x'), Says: `"../core-1.img", which is no CRIU image`},
		{Name: "name-in-a-folder", Make: entry(tar.Header{Typeflag: reg, Name: "parent/core-1.img"}, 'x'), Says: `"parent/core-1.img", which is no CRIU image`},
		{Name: "name-with-dot", Make: entry(tar.Header{Typeflag: reg, Name: "./core-1.img"}, 'x'), Says: `"./core-1.img", which is no CRIU image`},
		{Name: "long-name", Make: entry(tar.Header{Typeflag: reg, Name: "core-" + strings.Repeat("1", 5000) + ".img"}), Says: "which is no CRIU image"},
		{Name: "symbolic-link", Make: entry(tar.Header{Typeflag: tar.TypeSymlink, Name: "dump.log", Linkname: "/etc/shadow"}), Says: `"dump.log", which is no regular file`},
		{Name: "link-as-parent", Make: entry(tar.Header{Typeflag: tar.TypeSymlink, Name: "parent", Linkname: "/var/lib"}), Says: `"parent", which is no regular file`},
		{Name: "hard-link", Make: entry(tar.Header{Typeflag: tar.TypeLink, Name: "tty-info.img", Linkname: "/etc/shadow"}), Says: `"tty-info.img", which is no regular file`},
		{Name: "device", Make: entry(tar.Header{Typeflag: tar.TypeBlock, Name: "tty-data.img", Devmajor: 8}), Says: `"tty-data.img", which is no regular file`},
		{Name: "fifo", Make: entry(tar.Header{Typeflag: tar.TypeFifo, Name: "filelocks.img"}), Says: `"filelocks.img", which is no regular file`},
		{Name: "folder", Make: entry(tar.Header{Typeflag: tar.TypeDir, Name: "images/"}), Says: `"images/", which is no regular file`},
		{Name: "global-header", Make: entry(tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"path": "/etc/passwd"}}), Says: "which is no regular file"},
		{Name: "path-of-a-pax-header", Make: entry(tar.Header{Typeflag: reg, Name: "core-1.img" + strings.Repeat("/..", 80) + "/etc/passwd"}), Says: "which is no CRIU image"},
		{Name: "file-of-the-state-twice", Make: func(i *Image) { i.State = append(i.State, i.State[i.at("core-1.img")]) }, Says: `"core-1.img" twice`},
		{Name: "no-archive", Make: func(i *Image) {
			i.Tar = func([]byte) []byte { return bytes.Repeat([]byte("no tar archive "), 100) }
		}, Says: `state, behind "": archive/tar: invalid tar header`},
		{Name: "cut-off-archive", Make: func(i *Image) { i.Tar = func(p []byte) []byte { return p[:len(p)/2] } }, Says: "unexpected EOF"},
		{Name: "negative-size", Make: func(i *Image) {
			i.Tar = func(p []byte) []byte {
				copy(p[124:136], "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff") // size in base 256
				before := Tar([]Entry{Regular("timens-9.img", nil)})
				return join(before[:512], checksummed(p))
			}
		}, Says: `state, behind "timens-9.img": archive/tar: invalid tar header`},
		{Name: "data-behind-the-archive", Make: func(i *Image) {
			i.Tar = func(p []byte) []byte { return append(p, "something more"...) }
		}, Says: `state goes on behind its end: "something more"`},
		{Name: "archive-behind-the-archive", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { return append(p, compress(Tar([]Entry{Regular("core-1.img", nil)}))...) }
		}, Says: `state goes on behind its end: "core-1.img`},
		{Name: "garbage-behind-the-compressed", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { return append(p, "garbage"...) }
		}, Says: "state, behind its end: invalid input: magic number mismatch"},
		{Name: "not-compressed", Make: func(i *Image) {
			i.Compressed = func([]byte) []byte { return bytes.Repeat([]byte("plain"), 100) }
		}, Says: `state, behind "": invalid input: magic number mismatch`},
		{Name: "damaged-compression", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { p[len(p)/2] ^= 0x55; return p }
		}, Says: "invalid checkpoint image"},
		{Name: "state-other-than-its-digest", Make: func(i *Image) {
			i.put("stats-dump", []byte("so that no cache has it"))
			i.Tampered[kindState] = func(p []byte) []byte { p[len(p)/2] ^= 1; return p }
		}, Says: "digest"},
	}
}

// checksummed corrects the checksum of an archive's first header.
func checksummed(p []byte) []byte {
	copy(p[148:156], "        ")
	sum := 0
	for _, c := range p[:512] {
		sum += int(c)
	}
	copy(p[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return p
}

// bombTricks are small and unpack to much.
func bombTricks() []Trick {
	const huge = 5 << 30 // more than limits.max_state
	return []Trick{
		{Name: "bomb-of-zeros", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { return bomb("pages-1.img", huge) }
		}, Says: "unpacks to more than limits.max_state allows"},
		{Name: "bomb-of-messages", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { return bomb("core-1.img", 1<<30) }
		}, Says: "core-1.img has 1073741824 bytes"},
		{Name: "bomb-of-pagemaps", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { return bomb("pagemap-1.img", 1<<30) }
		}, Says: "pagemap-1.img has 1073741824 bytes"},
		{Name: "bomb-behind-the-archive", Make: func(i *Image) {
			i.Compressed = func(p []byte) []byte { return append(p, zeros(1<<30)...) }
		}, Says: "state has more than 1048576 zeros behind its end"},
		{Name: "sparse-file", Make: func(i *Image) {
			i.Tar = func(p []byte) []byte { return append(sparse("pages-999.img", 1<<30), p...) }
		}, Says: `"pages-999.img", which is no regular file`},
		{Name: "old-sparse-file", Make: func(i *Image) {
			i.Tar = func(p []byte) []byte {
				h := Tar([]Entry{{tar.Header{Typeflag: tar.TypeReg, Name: "pages-998.img", Format: tar.FormatGNU}, nil}})[:512]
				h[156] = tar.TypeGNUSparse
				copy(h[386:], "00000000000\x0000000000000\x00") // a piece of no bytes at 0
				copy(h[483:], "10000000000\x00")                // of a file of 1 GiB
				return join(checksummed(h), p)
			}
		}, Says: `"pages-998.img", which is no regular file`},
		{Name: "huge-window", Make: func(i *Image) {
			i.Compressed = func([]byte) []byte {
				// A frame header with a window of 1 GiB (RFC 8878, 3.1.1.1.2), and a block of one byte repeated.
				return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 20 << 3}, block(128<<10, 0)...)
			}
		}, Says: `state, behind "": window size exceeded`},
	}
}

// zeros is a zstd frame of n zeros: blocks of one repeated byte (RFC 8878, 3.1.1.2).
func zeros(n int64) []byte {
	const most = 128 << 10
	out := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 7 << 3} // window of 128 KiB
	for ; n > most; n -= most {
		out = append(out, block(most, 0)...)
	}
	return append(out, block(int(n), 1)...)
}

// block is a block of n zeros; last is 1 for the last one of a frame.
func block(n, last int) []byte {
	h := binary.LittleEndian.AppendUint32(nil, uint32(n<<3|1<<1|last))
	return append(h[:3], 0)
}

// bomb is a compressed archive of one file of n zeros.
func bomb(name string, n int64) []byte {
	var head bytes.Buffer
	must(tar.NewWriter(&head).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: n}))
	return append(compress(head.Bytes()), zeros(n)...)
}

// sparse is a file of an archive that has no data but n bytes (GNU sparse format 1.0 in PAX).
func sparse(name string, n int64) []byte {
	data := make([]byte, 512)
	copy(data, "0\n")
	return described(Regular("sparse", data), [][2]string{
		{"GNU.sparse.major", "1"}, {"GNU.sparse.minor", "0"}, {"GNU.sparse.name", name}, {"GNU.sparse.realsize", fmt.Sprint(n)},
	})
}

// described is an entry of an archive behind PAX records, which the writer would refuse.
func described(e Entry, records [][2]string) []byte {
	var text string
	for _, r := range records {
		line := fmt.Sprintf(" %s=%s\n", r[0], r[1])
		text += fmt.Sprintf("%d%s", len(line)+2, line) // of two digits
	}
	const end = 1024
	head := Tar([]Entry{Regular("PaxHeaders/x", []byte(text))})
	head[156] = tar.TypeXHeader
	body := Tar([]Entry{e})
	return append(checksummed(head[:len(head)-end]), body[:len(body)-end]...)
}

// tmpfsTricks are those of the archives that CRIU has the node's tar unpack into a tmpfs.
func tmpfsTricks() []Trick {
	archive := func(entries ...tar.Header) func(*Image) {
		return func(i *Image) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			w := tar.NewWriter(z)
			for n := range entries {
				must(w.WriteHeader(&entries[n]))
			}
			must(w.Close())
			must(z.Close())
			i.put(i.first("tmpfs-dev-"), b.Bytes())
		}
	}
	return []Trick{
		{Name: "tmpfs-path-upwards", Make: archive(tar.Header{Typeflag: tar.TypeReg, Name: "../../../etc/cron.d/evil"}), Says: "a path that leads out of it (../../../etc/cron.d/evil"},
		{Name: "tmpfs-absolute-path", Make: archive(tar.Header{Typeflag: tar.TypeReg, Name: "/etc/cron.d/evil"}), Says: "a path that leads out of it (/etc/cron.d/evil"},
		{Name: "tmpfs-through-a-link", Make: archive(tar.Header{Typeflag: tar.TypeSymlink, Name: "x", Linkname: "/etc"}, tar.Header{Typeflag: tar.TypeReg, Name: "x/passwd"}), Says: "a path through a link (x/passwd"},
		{Name: "tmpfs-hard-link", Make: archive(tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "/etc/shadow"}), Says: "a hard link that leads out of it (x"},
		{Name: "tmpfs-hard-link-through-a-link", Make: archive(tar.Header{Typeflag: tar.TypeSymlink, Name: "x", Linkname: "/etc"}, tar.Header{Typeflag: tar.TypeLink, Name: "y", Linkname: "x/shadow"}), Says: "a hard link through a link (y"},
		{Name: "tmpfs-of-two-names", Make: func(i *Image) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			_, err := z.Write(described(Regular("harmless", nil), [][2]string{{"GNU.sparse.name", "../../etc/cron.d/x"}}))
			must(err)
			must(z.Close())
			i.put(i.first("tmpfs-dev-"), b.Bytes())
		}, Says: "a second name, ../../etc/cron.d/x (harmless"},
		{Name: "tmpfs-path-of-megabytes", Make: archive(tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("d/", 400_000) + "x"}), Says: "a path that is too long (d/d/d"},
		{Name: "tmpfs-of-many-links", Make: func(i *Image) {
			links := make([]tar.Header, 5000)
			for n := range links {
				links[n] = tar.Header{Typeflag: tar.TypeSymlink, Name: fmt.Sprint(n, "/", strings.Repeat("e", 4000)), Linkname: "x"}
			}
			archive(links...)(i)
		}, Says: "too many links"},
		{Name: "many-tmpfs", Make: func(i *Image) {
			p := i.content(i.first("tmpfs-dev-"))
			mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
				for n := range uint32(5000) {
					i.put(fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", 10_000+n), p)
					m := proto.Clone(place(l, "/dev")).(*mnt.MntEntry)
					m.MntId, m.RootDev, m.Mountpoint = proto.Uint32(10_000+n), proto.Uint32(10_000+n), proto.String(fmt.Sprint("/t", n))
					l = append(l, m)
				}
				return l
			})(i)
		}, Says: "mount: the checkpoint has tmpfs at /t0"},
		{Name: "tmpfs-disk", Make: archive(tar.Header{Typeflag: tar.TypeBlock, Name: "sda", Devmajor: 8}), Says: "device 8:0 (sda"},
		{Name: "tmpfs-no-archive", Make: func(i *Image) { i.put(i.first("tmpfs-dev-"), []byte("x")) }, Says: "tar.gz.img: unexpected EOF"},
		{Name: "tmpfs-bomb", Make: func(i *Image) {
			var b bytes.Buffer
			z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
			must(err)
			must(tar.NewWriter(z).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "zeros", Size: 8 << 30}))
			piece := deflatedZeros()
			must(z.Flush())
			for range 4 {
				b.Write(piece)
			}
			i.put(i.first("tmpfs-dev-"), b.Bytes())
		}, Pod: func(s *specs.Spec) {
			limit := int64(128 << 20)
			s.Linux.Resources.Memory.Limit = &limit
		}, Says: "tmpfs archives unpack to more than 134217728 bytes"},
	}
}

// deflatedZeros is a piece of a deflate stream that says 64 MiB of zeros and begins and ends at a byte.
func deflatedZeros() []byte {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	must(err)
	must(z.Flush())
	head := b.Len()
	_, err = io.CopyN(z, zeroReader{}, 64<<20)
	must(err)
	must(z.Flush())
	return b.Bytes()[head:]
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
