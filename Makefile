# SPDX-License-Identifier: Apache-2.0
#
#   make demo    the whole thing, on this machine: cold start, checkpoint, eager and lazy restore
#   make test    all tests and the linters
#   make torture SEEDS=1000   random programs against the fault handler; FIRST= and REPEAT= for certain seeds
#   make restores RESTORES=500   one container restored again and again: nothing may be left behind
#   make soak DURATION=1h   restores, checkpoints and faults in a random order; SEED= for a certain one
#   make bench   benchmarks into build/bench, see docs/benchmarks.md; takes most of an hour
#   make trace   where the time of a restore goes, from traces
#   make up      the stack stays up for poking; make down ends it
#
# All of them need root and install what they need. Everything they make is below build/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

BIN := build/bin
COMMANDS := containerd-shim-thaw-v1 thaw-snapshotter thaw
# The daemon embeds libraries that need no cgo; without it all three run on any libc.
export CGO_ENABLED ?= 0
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

# Fuzz targets run for a number of inputs, not for a time, so that the result does not hang on the machine's speed.
FUZZ_COUNT ?= 20000x

# Of the torture test: how many seeds, from which one on (0: random), how often each.
SEEDS ?= 100
FIRST ?= 0
REPEAT ?= 1
# Of the test that restores a container again and again.
RESTORES ?= 500
# Of the soak: how long, and the seed of its order (0: random).
DURATION ?= 1m
SEED ?= 0

.PHONY: help deps build images test unit race fuzz torture restores soak e2e lint format demo bench trace up down clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

deps:
	@contrib/install-deps.sh

build:
	@echo "==> build: $(COMMANDS)"
	@mkdir -p $(BIN)
	@go build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ $(COMMANDS:%=./cmd/%)

# The programs that tests checkpoint, and their root filesystem.
images: deps
	@go run ./test/workloads/build

lint: deps
	@echo "==> lint: go vet"
	@go vet ./...
	@echo "==> lint: staticcheck"
	@$(BIN)/staticcheck ./...
	@echo "==> lint: gofumpt"
	@unformatted=$$(git ls-files -co --exclude-standard '*.go' | grep -v '\.pb\.go$$' | xargs $(BIN)/gofumpt -l); \
		[ -z "$$unformatted" ] || { echo "not formatted (make format does it):"; echo "$$unformatted"; exit 1; }

format: deps
	@git ls-files -co --exclude-standard '*.go' | grep -v '\.pb\.go$$' | xargs $(BIN)/gofumpt -w

# Packages that need no stack, with the race detector (which needs cgo). The manifests' test has a module of its own: it embeds
# parts of Kubernetes' API server.
unit:
	@echo "==> unit tests"
	@CGO_ENABLED=1 go test -race -timeout 10m $$(go list ./... | grep -v /test/e2e)
	@cd test/admission && go vet . && go test -timeout 10m .

fuzz:
	@contrib/fuzz.sh $(FUZZ_COUNT)

torture: deps
	@echo "==> torture: $(SEEDS) seeds"
	@go test -count=1 -timeout 0 -v -run 'TestFresh' ./test/torture -seeds $(SEEDS) -first $(FIRST) -repeat $(REPEAT)

restores: deps build images
	@echo "==> $(RESTORES) restores"
	@go test -count=1 -timeout 0 -v -run 'TestRepeatedRestores' ./test/e2e -restores $(RESTORES)

soak: deps build images
	@echo "==> soak: $(DURATION)"
	@go run ./test/soak -duration $(DURATION) -seed $(SEED)

e2e: deps build images
	@echo "==> end-to-end tests"
	@go test -count=1 -p 1 -timeout 25m -v ./test/e2e/... | grep -Ev '^=== (RUN|PAUSE|CONT|NAME)'

test: deps build images lint unit fuzz e2e

demo: deps build images
	@go run ./test/demo

bench: deps build images
	@contrib/install-deps.sh bench
	@go run ./test/bench -sizes 64,512,2048,4096 -workloads all -links all -systems all -parts all

trace: deps build images
	@go run ./test/trace

up: deps build images
	@go build -o $(BIN)/stack-up ./test/up
	@$(BIN)/stack-up start

down:
	@[ ! -x $(BIN)/stack-up ] || $(BIN)/stack-up stop

# What took long to fetch or compile stays: rm -rf build for all.
clean: down
	rm -rf build/stack build/bench build/workloads $(COMMANDS:%=$(BIN)/%)
