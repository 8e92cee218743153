// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	hostsconfig "github.com/containerd/containerd/v2/core/remotes/docker/config"
	dockerconfig "github.com/docker/cli/cli/config"
	"github.com/docker/cli/cli/config/configfile"
)

// HostOptions says where the node keeps what it knows about registries.
type HostOptions struct {
	// CertsDir is containerd's registry configuration folder, with
	// HOST/hosts.toml below it. It may be missing.
	CertsDir string
	// DockerConfig is a docker config.json, or the folder that holds one. It
	// may be missing. Empty means that there are no credentials.
	DockerConfig string
	// Connections is how many idle connections to keep to each host.
	Connections int
}

// Hosts returns the hosts of a registry, mirrors first, as the node's containerd
// has them configured. Both files are read anew for each call, as containerd
// does, so that changes need no restart.
func Hosts(ctx context.Context, o HostOptions) docker.RegistryHosts {
	opts := hostsconfig.HostOptions{
		Credentials: func(host string) (string, string, error) {
			return credentials(o.DockerConfig, host)
		},
		UpdateClient: func(c *http.Client) error {
			t, ok := c.Transport.(*http.Transport)
			if !ok {
				return errors.New("unexpected HTTP transport in containerd's registry configuration")
			}
			// HTTP/1.1 with several connections carries bulk data several times
			// faster than one HTTP/2 connection with Go's client.
			t.ForceAttemptHTTP2 = false
			t.MaxIdleConns = 0
			t.MaxIdleConnsPerHost = max(o.Connections, 2)
			t.IdleConnTimeout = 90 * time.Second
			t.ReadBufferSize = 64 << 10
			// Content is addressed by digest: it must arrive as it is stored.
			t.DisableCompression = true
			return nil
		},
	}
	if o.CertsDir != "" {
		opts.HostDir = hostsconfig.HostDirFromRoot(o.CertsDir)
	}
	return hostsconfig.ConfigureHosts(ctx, opts)
}

// credentials looks a host up in a docker configuration; credential helpers
// named there are run.
func credentials(path, host string) (user, secret string, err error) {
	if path == "" {
		return "", "", nil
	}
	dir, name := path, dockerconfig.ConfigFileName
	if strings.HasSuffix(path, ".json") {
		dir, name = filepath.Split(path)
	}
	var file *configfile.ConfigFile
	if name == dockerconfig.ConfigFileName {
		file, err = dockerconfig.Load(filepath.Clean(dir))
	} else {
		file, err = loadNamed(path)
	}
	if err != nil {
		return "", "", fmt.Errorf("credentials from %s: %w", path, err)
	}
	if host == "docker.io" || host == "registry-1.docker.io" {
		host = "https://index.docker.io/v1/"
	}
	auth, err := file.GetAuthConfig(host)
	if err != nil {
		return "", "", fmt.Errorf("credentials from %s: %w", path, err)
	}
	if auth.IdentityToken != "" {
		return "", auth.IdentityToken, nil
	}
	return auth.Username, auth.Password, nil
}
