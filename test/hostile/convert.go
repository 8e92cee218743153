// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"slices"
	"strings"
)

// ArchiveTrick is one way in which an archive for `thaw convert` may lie: what the kubelet's checkpoint API, crictl or Podman
// write.
type ArchiveTrick struct {
	Name string
	// Make makes the file out of a good archive's entries.
	Make func(entries []Entry) []byte
	// Says is part of the message that it is refused with.
	Says string
}

// ReadArchive returns the entries of an archive that is compressed by zstd.
func ReadArchive(p []byte) ([]Entry, error) { return untar(p) }

// ArchiveTricks returns all of them.
func ArchiveTricks() []ArchiveTrick {
	reg := byte(tar.TypeReg)
	first := func(h tar.Header, content ...byte) func([]Entry) []byte {
		h.Size = int64(len(content))
		return func(l []Entry) []byte { return Tar(slices.Insert(slices.Clone(l), 0, Entry{h, content})) }
	}
	replace := func(name string, content []byte) func([]Entry) []byte {
		return func(l []Entry) []byte {
			l = slices.Clone(l)
			for n := range l {
				if l[n].Name == name {
					l[n] = Regular(name, content)
					return Tar(l)
				}
			}
			return Tar(append(l, Regular(name, content)))
		}
	}
	without := func(name string) func([]Entry) []byte {
		return func(l []Entry) []byte {
			return Tar(slices.DeleteFunc(slices.Clone(l), func(e Entry) bool { return e.Name == name }))
		}
	}
	raw := func(f func([]byte) []byte) func([]Entry) []byte {
		return func(l []Entry) []byte { return f(Tar(l)) }
	}
	return []ArchiveTrick{
		{"absolute-path", first(tar.Header{Typeflag: reg, Name: "/etc/cron.d/evil"}, 'x'), `it has the file name "/etc/cron.d/evil"`},
		{"path-with-dots", first(tar.Header{Typeflag: reg, Name: "../../evil"}, 'x'), `it has the file name "../../evil"`},
		{"path-with-dots-within", first(tar.Header{Typeflag: reg, Name: "checkpoint/../../evil"}, 'x'), `it has the file name "checkpoint/../../evil"`},
		{"config-as-a-link", first(tar.Header{Typeflag: tar.TypeSymlink, Name: "config.dump", Linkname: "/etc/shadow"}), `"config.dump" is no regular file`},
		{"log-as-a-link", first(tar.Header{Typeflag: tar.TypeSymlink, Name: "dump.log", Linkname: "/etc/shadow"}), `"dump.log" is no regular file`},
		{"spec-as-a-hard-link", first(tar.Header{Typeflag: tar.TypeLink, Name: "spec.dump", Linkname: "/etc/shadow"}), `"spec.dump" is no regular file`},
		{"image-as-a-link", first(tar.Header{Typeflag: tar.TypeSymlink, Name: "checkpoint/core-1.img", Linkname: "/proc/kcore"}), `"checkpoint/core-1.img" is no regular file`},
		{"image-as-a-device", first(tar.Header{Typeflag: tar.TypeBlock, Name: "checkpoint/pages-1.img", Devmajor: 8}), `"checkpoint/pages-1.img" is no regular file`},
		{"changes-as-a-fifo", first(tar.Header{Typeflag: tar.TypeFifo, Name: "rootfs-diff.tar"}), `"rootfs-diff.tar" is no regular file`},
		{"file-twice", first(tar.Header{Typeflag: reg, Name: "./config.dump"}, '{', '}'), "it has config.dump twice"},
		{"more-than-allowed", first(tar.Header{Typeflag: reg, Name: "checkpoint/pages-9.img"}, make([]byte, 70<<20)...), "it unpacks to more than allowed"},
		{"bomb-in-what-is-not-needed", raw(func(p []byte) []byte {
			var head bytes.Buffer
			must(tar.NewWriter(&head).WriteHeader(&tar.Header{Typeflag: reg, Name: "volumes/zeros", Size: 1 << 40}))
			return compress(append(head.Bytes(), p...))
		}), `"volumes/zeros" is more than allowed`},
		{"sparse-file", raw(func(p []byte) []byte { return append(sparse("checkpoint/pages-9.img", 1<<40), p...) }), "is more than allowed"},
		{"many-entries", raw(func(p []byte) []byte {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for n := range 1<<16 + 1 {
				must(w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprint("d", n)}))
			}
			must(w.Flush())
			return append(b.Bytes(), p...)
		}), "it has more than 65536 entries"},
		{"no-archive", func([]Entry) []byte { return bytes.Repeat([]byte("no archive "), 1000) }, "archive/tar: invalid tar header"},
		{"cut-off", raw(func(p []byte) []byte { return p[:len(p)/2] }), "unexpected EOF"},
		{"broken-gzip", func([]Entry) []byte { return []byte{0x1f, 0x8b, 7, 7, 7, 7, 7, 7, 7, 7, 7} }, "gzip: invalid header"},
		{"huge-window", func([]Entry) []byte {
			return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 21 << 3}, block(128<<10, 1)...)
		}, "window size exceeded"},
		{"no-config", without("config.dump"), "it has no config.dump"},
		{"no-spec", without("spec.dump"), "it has no spec.dump"},
		{"no-inventory", without("checkpoint/inventory.img"), "inventory.img is missing"},
		{"config-that-is-no-json", replace("config.dump", []byte("\x1b[2J")), "config.dump: invalid character"},
		{"config-with-an-endless-number", replace("config.dump", []byte(`{"name":`+strings.Repeat("7", 1<<20)+`}`)), "config.dump: json: cannot unmarshal number"},
		{"spec-that-is-no-json", replace("spec.dump", []byte("nothing")), "spec.dump: invalid character"},
		{"huge-config", replace("config.dump", make([]byte, 17<<20)), "config.dump is larger than"},
		{"deleted-files-that-are-no-json", replace("deleted.files", []byte("{}")), "deleted.files: json: cannot unmarshal object"},
		{"unknown-image", replace("checkpoint/evil\x1b[2J.img", []byte("x")), `"evil\x1b[2J.img"`},
		{"short-pages", replace("checkpoint/pages-1.img", make([]byte, 4096)), "pages-1.img has 4096 bytes"},
		{"pages-of-nobody", replace("checkpoint/pages-9.img", make([]byte, 4096)), "no pagemap refers to pages-9.img"},
		{"images-over-the-limit", replace("checkpoint/descriptors.json", make([]byte, 1<<20)), "descriptors.json has 1048576 bytes"},
		{"damaged-image", replace("checkpoint/pstree.img", []byte("nothing")), "pstree.img does not begin as"},
		{"changes-that-are-no-archive", replace("rootfs-diff.tar", bytes.Repeat([]byte("x"), 2000)), "archive/tar: invalid tar header"},
		{"changes-that-are-a-bomb", func(l []Entry) []byte {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			must(tar.NewWriter(z).WriteHeader(&tar.Header{Typeflag: reg, Name: "zeros", Size: 1 << 40}))
			must(z.Flush())
			b.Write(deflatedZeros())
			return replace("rootfs-diff.tar", b.Bytes())(l)
		}, "changes in the root filesystem"},
	}
}

// HostileBases are names of base images that an archive may not make anybody ask for.
func HostileBases() []string {
	return []string{"http://169.254.169.254/latest", "host/a b", "\x1b[2J", strings.Repeat("a/", 300)}
}
