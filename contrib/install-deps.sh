#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# install-deps.sh: everything that thaw's demo, tests and benchmarks need on a Debian machine.
#
# Installs build tools from Debian with apt. Whatever else is needed goes below build/ and leaves the host alone:
#   build/criu/          CRIU of a newer Debian suite with its own libraries, unless the host's criu is new enough
#   build/registry/      Debian's docker-registry, unpacked only: no service, no user
#   build/bin/           criu, containerd, ctr, runc, crictl, docker-registry; staticcheck and gofumpt
#
# Running it again does only what is missing. Run as root, from anywhere.
#
#   install-deps.sh [bench]    bench: also build/podman/, Podman of the newer suite, which only the benchmarks need
#
# Environment:
#   THAW_CRIU_SUITE  Debian suite that criu is taken from (default: forky)
#   THAW_CRIU_MIN    oldest acceptable CRIU (default: 4.2)
#
# Older versions fail on new kernels: before 4.1 on the vDSO's layout from Linux 6.14 on, and before 4.2 on each internet socket
# from Linux 6.16 on, which refuses SO_PASSCRED there ("Can't get 1:16 opt: Operation not supported").
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build
bin=$build/bin
suite=${THAW_CRIU_SUITE:-forky}
criu_min=${THAW_CRIU_MIN:-4.2}

started=$SECONDS
step() { printf '==> [%3ds] %s\n' $((SECONDS - started)) "$*"; }
fail() { printf 'install-deps: %s\n' "$*" >&2; exit 1; }

# newer_or_equal A B: version A >= version B, in Debian's order.
newer_or_equal() { dpkg --compare-versions "$1" ge "$2"; }

# --- packages of this machine's own suite ---------------------------------------------------------------------------

packages=(
	gcc libc6-dev libseccomp-dev pkg-config patchelf   # runc needs cgo and libseccomp; the CRIU prefix needs patchelf
	containernetworking-plugins iptables iproute2      # pod networks; CRIU locks connections with iptables
	util-linux                                         # nsenter, for the stack that `make up` leaves running
	systemd                                            # tests run the daemon under its unit
	skopeo mmdebstrap zstd                             # move images; make the workloads' root filesystem
)

install_packages() {
	local missing=() p
	for p in "${packages[@]}"; do
		[ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
	done
	if [ ${#missing[@]} = 0 ]; then
		step "Debian packages: all there"
		return
	fi
	step "Debian packages: installing ${missing[*]}"
	apt-get -q update
	DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}"
}

# --- Go ---------------------------------------------------------------------------------------------------------------

check_go() {
	command -v go >/dev/null || fail "go is not installed: install Go 1.21 or newer (it fetches the version that go.mod names by itself)"
	# Any Go from 1.21 on switches to the toolchain of go.mod.
	(cd "$root" && go version) || fail "go does not run in $root: see the message above"
}

# --- packages of other suites, unpacked under a prefix ----------------------------------------------------------------

# debian_mirror: the base address of this machine's own Debian archive, from apt's configuration.
debian_mirror() {
	apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
		awk '$1 == "Debian" && $2 !~ /security|backports/ { print $2; exit }'
}

# unpack_suite SUITE PREFIX PACKAGE...: downloads the packages with all that they depend on from SUITE into an apt state
# of its own, and unpacks them below PREFIX. Nothing is installed and no maintainer script runs.
unpack_suite() {
	local suite=$1 prefix=$2 mirror state deb
	shift 2
	mirror=$(debian_mirror)
	if [ -z "$mirror" ]; then
		apt-get -q update
		mirror=$(debian_mirror)
	fi
	[ -n "$mirror" ] || fail "no Debian archive in apt's configuration: cannot fetch $* of $suite"
	state=$build/cache/apt-$suite
	mkdir -p "$state"/{lists/partial,archives/partial,etc/preferences.d,etc/sources.list.d}
	: >"$state/status"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$state/etc/sources.list"
	local opts=(-q
		-o Dir::State="$state" -o Dir::State::status="$state/status" -o Dir::State::lists="$state/lists"
		-o Dir::Cache="$state" -o Dir::Cache::archives="$state/archives"
		-o Dir::Etc::sourcelist="$state/etc/sources.list" -o Dir::Etc::sourceparts="$state/etc/sources.list.d"
		-o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts="$state/etc/preferences.d"
		-o APT::Install-Recommends=false -o APT::Sandbox::User=root -o Debug::NoLocking=true
		# Container images often delete what was downloaded right after it was.
		-o APT::Keep-Downloaded-Packages=true -o DPkg::Post-Invoke::= -o APT::Update::Post-Invoke::=)
	apt-get "${opts[@]}" update
	apt-get "${opts[@]}" -y --download-only install "$@"
	rm -rf "$prefix.new"
	mkdir -p "$prefix.new"
	for deb in "$state"/archives/*.deb; do
		dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$prefix.new" --keep-directory-symlink \
			--exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale'
	done
	rm -rf "$state" "$prefix"
	mv "$prefix.new" "$prefix"
}

# relocate PREFIX PROGRAM...: makes programs of the prefix use the libraries beside them, whatever libc the host has.
relocate() {
	local prefix=$1 libs loader program
	libs=$prefix/usr/lib/$(gcc -print-multiarch)
	loader=$(find "$prefix" -name 'ld-linux*.so*' -print -quit)
	[ -n "$loader" ] || fail "no dynamic loader among the packages in $prefix"
	shift
	for program; do
		# Libraries find each other by the executable's rpath: DT_RPATH, unlike RUNPATH, is inherited.
		patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libs" "$prefix/$program"
	done
}

# --- CRIU -------------------------------------------------------------------------------------------------------------

# criu_version BINARY: "4.1.1", or nothing if it does not run.
criu_version() { "$1" --version 2>/dev/null | awk '/^Version:/ { print $2; exit }'; }

install_criu() {
	local host version real=''
	host=$(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin command -v criu || true)
	if [ -n "$host" ]; then
		version=$(criu_version "$host")
		[ -z "$version" ] || ! newer_or_equal "$version" "$criu_min" || real=$host
	fi
	if [ -z "$real" ]; then
		real=$build/criu/usr/sbin/criu
		version=$(criu_version "$real" || true)
		if [ -z "$version" ] || ! newer_or_equal "$version" "$criu_min"; then
			step "CRIU: fetching from Debian $suite (the host has ${host:-none that is new enough})"
			unpack_suite "$suite" "$build/criu" criu
			relocate "$build/criu" usr/sbin/criu
			version=$(criu_version "$real") || true
			[ -n "$version" ] || fail "criu of Debian $suite does not run here: try $real --version"
			newer_or_equal "$version" "$criu_min" || fail "Debian $suite has CRIU $version, $criu_min is needed: set THAW_CRIU_SUITE to a newer suite"
		fi
	fi
	install_criu_entry "$real"
	step "CRIU $version: $real"
}

# install_criu_entry REAL: build/bin/criu, by which the stack finds it. CAP_SYS_RESOURCE (bit 24) is what CRIU needs to read
# the limits of other users' tasks: see test/criu/prlimit_preload.c.
install_criu_entry() {
	local real=$1 bounding
	bounding=$(awk '/^CapEff:/ { print $2 }' /proc/self/status)
	rm -f "$bin/criu"
	if (((16#$bounding >> 24) & 1)); then
		ln -s "$real" "$bin/criu"
		return
	fi
	gcc -shared -fPIC -O2 -Wall -Wextra -o "$build/criu-prlimit.so" "$root/test/criu/prlimit_preload.c" -ldl
	cat >"$bin/criu" <<-WRAPPER
		#!/bin/sh
		# Test stacks only: this machine lacks CAP_SYS_RESOURCE. Written by contrib/install-deps.sh.
		LD_PRELOAD=$build/criu-prlimit.so exec $real "\$@"
	WRAPPER
	chmod 755 "$bin/criu"
}

# --- Podman -----------------------------------------------------------------------------------------------------------

install_podman() {
	local prefix=$build/podman
	if ! "$prefix/usr/bin/podman" --version >/dev/null 2>&1; then
		step "Podman: fetching from Debian $suite (unpacked only, no service)"
		unpack_suite "$suite" "$prefix" podman
		relocate "$prefix" usr/bin/conmon usr/bin/podman
	fi
	ln -sfn ../podman/usr/bin/podman "$bin/podman"
	step "$("$bin/podman" --version): $prefix"
}

# --- Debian's registry ------------------------------------------------------------------------------------------------

install_registry() {
	local work
	if [ ! -x "$build/registry/usr/bin/docker-registry" ]; then
		step "docker-registry: fetching (unpacked only, no service)"
		work=$(mktemp -d)
		apt-cache show docker-registry >/dev/null 2>&1 || apt-get -q update
		# As root: apt's own user cannot write to a private temporary folder.
		(cd "$work" && apt-get -q -o APT::Sandbox::User=root download docker-registry)
		mkdir -p "$build/registry"
		dpkg -x "$work"/docker-registry_*.deb "$build/registry"
		rm -rf "$work"
	fi
	ln -sfn ../registry/usr/bin/docker-registry "$bin/docker-registry"
	step "docker-registry: $build/registry"
}

# --- tools built from source ------------------------------------------------------------------------------------------

build_tools() {
	local stamp=$bin/.tools want
	want=$(cat "$root/test/tools/go.mod" "$root/test/tools/go.sum" "$0" | sha256sum)
	if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
		step "tools: up to date"
		return
	fi
	cd "$root/test/tools"
	step "tools: modules"
	go mod download
	step "tools: runc"
	CGO_ENABLED=1 go build -tags seccomp -o "$bin/" github.com/opencontainers/runc
	step "tools: containerd and ctr (minutes, the first time)"
	CGO_ENABLED=0 go build -o "$bin/" github.com/containerd/containerd/v2/cmd/containerd \
		github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2 github.com/containerd/containerd/v2/cmd/ctr
	step "tools: crictl"
	CGO_ENABLED=0 go build -o "$bin/" sigs.k8s.io/cri-tools/cmd/crictl
	step "tools: staticcheck and gofumpt"
	CGO_ENABLED=0 go build -o "$bin/" honnef.co/go/tools/cmd/staticcheck mvdan.cc/gofumpt
	echo "$want" >"$stamp"
}

[ $# = 0 ] || [ "$*" = bench ] || fail "unexpected arguments $*: only bench is known"
[ "$(id -u)" = 0 ] || fail "must run as root: it installs packages, and the test stack needs namespaces and mounts"
command -v apt-get >/dev/null || fail "only Debian and its derivatives are supported: apt-get is missing"
mkdir -p "$bin" "$build/cache"
install_packages
check_go
install_criu
install_registry
build_tools
[ $# = 0 ] || install_podman
step "done: $bin"
