// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// subject is a program in a certain state, which all systems bring back.
type subject struct {
	workload string // as in rows, and the name of its image
	mib      int    // nominal memory; 0: as much as the checkpoint holds
	env      map[string]string
	// warm brings a program that was just started at an address to the state that is checkpointed.
	warm func(ctx context.Context, ip string) error
	// ask gets and checks the first reply of a program that was restored, or started fresh, as often as needed until there is one.
	ask func(ctx context.Context, ip string, fresh bool) error
}

func (s *subject) name() string {
	if s.workload == workloads.Synthetic {
		return fmt.Sprintf("%s-%d", s.workload, s.mib)
	}
	return s.workload
}

// subjectOf gives a subject by its name in flags.
func subjectOf(workload string, mib int) (*subject, error) {
	switch workload {
	case workloads.Synthetic:
		return synthetic(mib), nil
	case workloads.Agent:
		return counting(workload, "/ask?q=kakakaka+kakakaro", "session", "answer"), nil
	case workloads.Node:
		return counting(workload, "/ask?key=77", "count", "value"), nil
	case workloads.Redis:
		return redis(), nil
	}
	return nil, fmt.Errorf("-workloads: there is no %q", workload)
}

// synthetic is the server of a certain size; its first reply touches 1 % of the memory and checks each page of it.
func synthetic(mib int) *subject {
	touch := func(ctx context.Context, ip string) error {
		b, err := stack.FirstReply(ctx, "http://"+ip+":8080/touch")
		if err != nil {
			return err
		}
		var answer struct{ OK bool }
		if err := json.Unmarshal(b, &answer); err != nil || !answer.OK {
			return wrongf("reply %s", b)
		}
		return nil
	}
	return &subject{
		workload: workloads.Synthetic, mib: mib, env: map[string]string{"MEMORY_MIB": strconv.Itoa(mib)},
		warm: touch, ask: func(ctx context.Context, ip string, _ bool) error { return touch(ctx, ip) },
	}
}

// counting is a server that answers a question, always in the same way, and counts the questions in memory: a restored one goes
// on with the next number.
func counting(workload, question, counter, answer string) *subject {
	const asked = 3
	// What was answered before the checkpoint. Other systems warm one up for themselves, which must answer the same.
	var want any
	ask := func(ctx context.Context, ip string, number int) error {
		b, err := stack.FirstReply(ctx, "http://"+ip+":8080"+question)
		if err != nil {
			return err
		}
		var reply map[string]any
		if err := json.Unmarshal(b, &reply); err != nil {
			return wrongf("reply %q", b)
		}
		if want == nil {
			want = reply[answer]
		}
		if reply[counter] != float64(number) || want == nil || !reflect.DeepEqual(reply[answer], want) {
			return wrongf("reply %s: number %d and the answer %v belong there", b, number, want)
		}
		return nil
	}
	return &subject{
		workload: workload,
		warm: func(ctx context.Context, ip string) error {
			for number := range asked {
				if err := ask(ctx, ip, number+1); err != nil {
					return err
				}
			}
			return nil
		},
		ask: func(ctx context.Context, ip string, fresh bool) error {
			if fresh {
				return ask(ctx, ip, 1)
			}
			return ask(ctx, ip, asked+1)
		},
	}
}

// redis is a Redis with 1 GiB of values. A fresh one has none: its first reply is to PING.
func redis() *subject {
	const values, size = 1 << 20, 1 << 10
	value := func(i int) []byte {
		// As compressible as text in an alphabet of 64 letters: by a quarter.
		const letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"
		source := rand.NewPCG(uint64(i), 1)
		b := make([]byte, size)
		for at := 0; at < size; {
			bits := source.Uint64()
			for range 8 {
				b[at] = letters[bits&63]
				bits >>= 8
				at++
			}
		}
		return b
	}
	return &subject{
		workload: workloads.Redis, mib: values * size >> 20,
		warm: func(ctx context.Context, ip string) error {
			c, err := dialRedis(ctx, ip)
			if err != nil {
				return err
			}
			defer c.close()
			return c.load(values, value)
		},
		ask: func(ctx context.Context, ip string, fresh bool) error {
			c, err := dialRedis(ctx, ip)
			if err != nil {
				return err
			}
			defer c.close()
			if fresh {
				return nil
			}
			const key = 777777
			got, err := c.get(key)
			if err != nil {
				return err
			}
			if string(got) != string(value(key)) {
				return wrongf("value %.20q… of %d bytes", got, len(got))
			}
			return nil
		},
	}
}

// wrongReply is a reply that is not what it must be.
type wrongReply struct{ what string }

func (w wrongReply) Error() string { return "wrong " + w.what }

func wrongf(format string, args ...any) error { return wrongReply{fmt.Sprintf(format, args...)} }
