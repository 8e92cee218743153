// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// chunkSample is how much of a program's memory is compressed, in bytes.
const chunkSample = 64 << 20

// chunkSizes are the sizes of chunks that are compared, in KiB.
var chunkSizes = []int{4, 16, 64, 128, 256, 512, 1024}

// chunkLevels are the levels that are compared.
var chunkLevels = []zstd.EncoderLevel{zstd.SpeedFastest, zstd.SpeedDefault, zstd.SpeedBetterCompression}

// chunks measures on one processor what the size of chunks and the level of compression cost and bring with the program's memory.
func (b *bench) chunks(ctx context.Context, l *lane) error {
	memory, err := sampleMemory(l.images)
	if err != nil {
		return err
	}
	for _, kib := range chunkSizes {
		for _, level := range chunkLevels {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := b.compress(l, memory, kib<<10, level); err != nil {
				return err
			}
		}
	}
	return nil
}

// Names of the measurements.
const (
	chunkRatio  = "ratio"
	chunkEncode = "compress"
	chunkDecode = "decompress"
)

func chunkMeasure(what string, size int, level zstd.EncoderLevel) string {
	return fmt.Sprintf("%s, chunks of %d KiB, %s", what, size>>10, level)
}

// compress measures one size and level.
func (b *bench) compress(l *lane, memory []byte, size int, level zstd.EncoderLevel) (err error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(level), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false),
		zstd.WithWindowSize(max(size, zstd.MinWindowSize)))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, enc.Close()) }()
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer dec.Close()
	var frames [][]byte
	var stored int
	began := time.Now()
	for at := 0; at+size <= len(memory); at += size {
		frame := enc.EncodeAll(memory[at:at+size], nil)
		frames, stored = append(frames, frame), stored+len(frame)
	}
	encoded := time.Since(began)
	page := make([]byte, 0, size)
	began = time.Now()
	for _, f := range frames {
		if page, err = dec.DecodeAll(f, page[:0]); err != nil {
			return err
		}
	}
	decoded := time.Since(began)
	raw := float64(len(frames) * size)
	for _, m := range []measure{
		{Name: chunkMeasure(chunkRatio, size, level), Value: raw / float64(stored), Unit: ":1"},
		{Name: chunkMeasure(chunkEncode, size, level), Value: raw / encoded.Seconds() / 1e6, Unit: "MB/s"},
		{Name: chunkMeasure(chunkDecode, size, level), Value: raw / decoded.Seconds() / 1e6, Unit: "MB/s"},
	} {
		m.System, m.Workload, m.MemoryMiB, m.Link = thaw, l.workload, l.mib, l.link
		b.add(m)
	}
	return nil
}

// sampleMemory reads pages that are not zero from CRIU's images, from all over the files if there are more than the sample has.
func sampleMemory(images string) ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(images, "pages-*.img"))
	if err != nil {
		return nil, err
	}
	var total int64
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			return nil, err
		}
		total += info.Size()
	}
	// In runs as long as the largest chunk, so that neighbours stay together.
	run := int64(chunkSizes[len(chunkSizes)-1] << 10)
	every := max(total/chunkSample, 1)
	var memory []byte
	buf, zero := make([]byte, run), make([]byte, pageindex.PageSize)
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		for at := int64(0); ; at += run * every {
			n, err := f.ReadAt(buf, at)
			for p := 0; p+len(zero) <= n; p += len(zero) {
				if page := buf[p : p+len(zero)]; !bytes.Equal(page, zero) {
					memory = append(memory, page...)
				}
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				return nil, errors.Join(err, f.Close())
			}
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
	if len(memory) < int(run) {
		return nil, fmt.Errorf("%d bytes of memory in %s, too little to compress", len(memory), images)
	}
	return memory, nil
}

// chunkTable shows what was measured of sizes and levels.
func (b *bench) chunkTable(m *markdown) {
	values := make(map[[2]string]float64)
	var programs []string
	for _, v := range b.measures {
		if v.Name == chunkMeasure(chunkRatio, chunkSizes[0]<<10, chunkLevels[0]) {
			programs = append(programs, v.Workload)
		}
		values[[2]string{v.Workload, v.Name}] = v.Value
	}
	if len(programs) == 0 {
		return
	}
	m.line("", "## Size of chunks and level of compression", "",
		"Of memory that is not zero, on one processor: compression ratio, compression and decompression in MB/s.", "")
	m.header(append([]string{"chunk", "level"}, programs...)...)
	for _, kib := range chunkSizes {
		for _, level := range chunkLevels {
			row := []string{fmt.Sprintf("%d KiB", kib), level.String()}
			for _, p := range programs {
				at := func(what string) float64 { return values[[2]string{p, chunkMeasure(what, kib<<10, level)}] }
				row = append(row, fmt.Sprintf("%.2f, %.0f, %.0f", at(chunkRatio), at(chunkEncode), at(chunkDecode)))
			}
			m.row(row...)
		}
	}
}
