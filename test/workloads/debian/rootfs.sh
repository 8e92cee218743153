#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# rootfs.sh OUTPUT.tar: the root filesystem that the Debian workloads share, made with mmdebstrap from this machine's own mirror.
# The same packages give the same bytes. Needs root and network; does nothing if OUTPUT.tar exists.
set -eu
output=$1
[ ! -e "$output" ] || exit 0

mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
	awk '$1 == "Debian" && $2 !~ /security|backports/ { print $2; exit }')
[ -n "$mirror" ] || { echo "rootfs.sh: no Debian archive in apt's configuration: run apt-get update" >&2; exit 1; }

echo "==> Debian root filesystem for the workloads (half a minute, the first time)"
mkdir -p "$(dirname "$output")"
# Documentation and translations only cost time on each pull.
SOURCE_DATE_EPOCH=0 mmdebstrap --quiet --variant=minbase \
	--include=python3,nodejs,redis-server,redis-tools,nginx-light,busybox,ca-certificates \
	--aptopt='APT::Install-Recommends "false"' \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/nodejs/*/man/*' \
	--customize-hook='rm -rf "$1"/usr/share/i18n "$1"/var/lib/apt/lists/* "$1"/var/cache/debconf/*-old' \
	bookworm "$output.new.tar" "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main"
mv "$output.new.tar" "$output"
