// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/urfave/cli/v2"

	"thaw.dev/thaw/snapshotter/config"
)

var (
	addressFlag = &cli.StringFlag{
		Name: "address", Aliases: []string{"a"}, EnvVars: []string{"CONTAINERD_ADDRESS"},
		Usage: "containerd's socket (default: from thaw's configuration)",
	}
	namespaceFlag = &cli.StringFlag{
		Name: "namespace", Aliases: []string{"n"}, EnvVars: []string{"CONTAINERD_NAMESPACE"},
		Usage: "containerd `NAMESPACE` of the container (default: k8s.io if it is there, else default)",
	}
	hostsDirFlag = &cli.StringFlag{
		Name: "hosts-dir", EnvVars: []string{"THAW_HOSTS_DIR"},
		Usage: "containerd's registry configuration, with HOST/hosts.toml in it (default: from thaw's configuration)",
	}
	configFlag = &cli.StringFlag{
		Name: "config", Aliases: []string{"c"}, EnvVars: []string{"THAW_CONFIG"},
		Usage: "thaw's configuration `FILE` (default: " + config.DefaultPath + ")",
	}
	jsonFlag    = &cli.BoolFlag{Name: "json", Usage: "print JSON"}
	quietFlag   = &cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "show no progress"}
	reuseFlag   = &cli.StringSliceFlag{Name: "reuse", Usage: "checkpoint image `REF` whose memory need not be uploaded again where it is the same (may be repeated)"}
	encryptFlag = &cli.StringSliceFlag{Name: "encrypt-for", Usage: "encrypt memory and state for a `RECIPIENT`: jwe:FILE with a public key, or provider:NAME (may be repeated)"}
	baseFlag    = &cli.StringFlag{Name: "base", Usage: "base image `REF`, if it is not the one that the container names"}
	socketFlag  = &cli.StringFlag{Name: "socket", EnvVars: []string{"THAW_ADDRESS"}, Usage: "socket of the node's thaw-snapshotter (default: from thaw's configuration)"}
)

// nodeConfig reads the node's configuration. A missing file means defaults.
func nodeConfig(c *cli.Context) (*config.Config, error) {
	return config.Load(c.String(configFlag.Name))
}

func certsDir(c *cli.Context, cfg *config.Config) string {
	if d := c.String(hostsDirFlag.Name); d != "" {
		return d
	}
	return cfg.Registry.CertsDir
}

// useDockerConfig makes credentials come from where the node's configuration
// says, unless the user's environment says otherwise. A file must have docker's
// usual name for that.
func useDockerConfig(cfg *config.Config) error {
	dir := cfg.Registry.DockerConfig
	if os.Getenv("DOCKER_CONFIG") != "" || dir == "" {
		return nil
	}
	st, err := os.Stat(dir)
	if err != nil {
		return nil
	}
	if !st.IsDir() {
		if filepath.Base(dir) != "config.json" {
			return nil
		}
		dir = filepath.Dir(dir)
	}
	return os.Setenv("DOCKER_CONFIG", dir)
}

const dialTimeout = 5 * time.Second

// connect returns a client of the node's containerd.
func connect(c *cli.Context, cfg *config.Config) (*containerd.Client, error) {
	address := c.String(addressFlag.Name)
	if address == "" {
		address = cfg.Containerd.Address
	}
	// The client waits for a socket to appear; people want to know at once.
	conn, err := net.DialTimeout("unix", strings.TrimPrefix(address, "unix://"), dialTimeout)
	if err != nil {
		return nil, fmt.Errorf("containerd does not answer at %s: start it, or name its socket with --address: %w", address, err)
	}
	conn.Close()
	client, err := containerd.New(strings.TrimPrefix(address, "unix://"))
	if err != nil {
		return nil, fmt.Errorf("containerd does not answer at %s: start it, or name its socket with --address: %w", address, err)
	}
	return client, nil
}
