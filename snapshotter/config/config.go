// SPDX-License-Identifier: Apache-2.0

// Package config is the configuration of a node: where thaw keeps its files,
// what it talks to, and its limits. Every key has a default that is right for a
// node with an ordinary containerd, so that a node needs no file at all;
// docs/operations.md lists the keys.
package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// DefaultPath is where the configuration is read from when no other file is
// named. It may be missing.
const DefaultPath = "/etc/thaw/config.toml"

// maxFileSize bounds the file in bytes.
const maxFileSize = 1 << 20

// What happens to pages that nothing has touched yet once a container runs
// again.
const (
	PolicyLazy     = "lazy"     // nothing is fetched until it is touched
	PolicyCached   = "cached"   // the node's page store is filled in the background
	PolicyComplete = "complete" // the processes' memory is filled too
)

// Policies are the valid values of Config.Policy.
func Policies() []string { return []string{PolicyLazy, PolicyCached, PolicyComplete} }

// Config is the whole configuration.
type Config struct {
	// StateDir holds sockets and CRIU's images while containers use them. It
	// must be on a tmpfs: what it holds must not outlive a boot.
	StateDir string `toml:"state_dir"`
	// CacheDir holds the page store and checkpoint metadata.
	CacheDir string `toml:"cache_dir"`
	// Policy is used for pods without the annotation thaw.dev/policy.
	Policy string `toml:"policy"`
	// LogLevel is one of containerd's: trace, debug, info, warn, error.
	LogLevel string `toml:"log_level"`

	Containerd  Containerd  `toml:"containerd"`
	Registry    Registry    `toml:"registry"`
	Trust       Trust       `toml:"trust"`
	Decryption  Decryption  `toml:"decryption"`
	Limits      Limits      `toml:"limits"`
	Background  Background  `toml:"background"`
	CRIU        CRIU        `toml:"criu"`
	Metrics     Metrics     `toml:"metrics"`
	Snapshotter Snapshotter `toml:"snapshotter"`
	PageServer  PageServer  `toml:"page_server"`
}

// Containerd is how the node's containerd is reached.
type Containerd struct {
	// Address is the path of containerd's gRPC socket.
	Address string `toml:"address"`
}

// Registry is how registries are reached: as containerd does it.
type Registry struct {
	// CertsDir is containerd's registry configuration folder
	// (config_path in its config), with HOST/hosts.toml below it.
	CertsDir string `toml:"certs_dir"`
	// DockerConfig is the file with credentials, or the folder that holds it
	// as config.json.
	DockerConfig string `toml:"docker_config"`
	// Timeout is how long a process waits for a page without any progress
	// before its container is given up.
	Timeout Duration `toml:"timeout"`
	// MetadataTimeout is the same for what is fetched before a container starts.
	MetadataTimeout Duration `toml:"metadata_timeout"`
	// StallTimeout ends an attempt in which no byte arrives for so long.
	StallTimeout Duration `toml:"stall_timeout"`
}

// Trust is which images may be restored; see package policy.
type Trust struct {
	// Repositories are those that images may come from: HOST/PATH, or HOST/* and
	// HOST/PATH/* for all below. None means all.
	Repositories []string `toml:"repositories"`
	// RequireDigest refuses images that are not named by digest.
	RequireDigest bool `toml:"require_digest"`
	// VerifiersDir has image verifiers as containerd's plugin calls them, all of
	// which must accept an image. Empty: there are none.
	VerifiersDir string `toml:"verifiers_dir"`
	// VerdictLifetime is how long an image that was accepted is not verified again.
	VerdictLifetime Duration `toml:"verdict_lifetime"`
}

// Decryption is where the keys of encrypted checkpoints are: where containerd has
// those of encrypted images.
type Decryption struct {
	// KeysDir has private keys in PEM, DER or JWK.
	KeysDir string `toml:"keys_dir"`
	// KeyproviderConfig names key providers (ocicrypt_keyprovider.conf); default
	// $OCICRYPT_KEYPROVIDER_CONFIG, or where containerd's own configuration has it.
	KeyproviderConfig string `toml:"keyprovider_config"`
}

// Limits bound what a checkpoint image or the sum of them may take.
type Limits struct {
	// ParallelFetches is the most requests for page data that run at once.
	ParallelFetches int `toml:"parallel_fetches"`
	// RequestSize is the most that one request for page data asks for.
	RequestSize Size `toml:"request_size"`
	// MaxMemory refuses checkpoints with more lazy memory.
	MaxMemory Size `toml:"max_memory"`
	// MaxState refuses checkpoints whose state is larger, compressed or unpacked.
	MaxState Size `toml:"max_state"`
	// MaxPageIndex refuses checkpoints whose page index is larger.
	MaxPageIndex Size `toml:"max_page_index"`
	// CacheSize is what the page store may take on disk; what running
	// containers need is kept even if it is more.
	CacheSize Size `toml:"cache_size"`
	// MetadataCacheSize is what configs, states and page indexes may take on disk.
	MetadataCacheSize Size `toml:"metadata_cache_size"`
	// UnusedImages is how many laid-out images stay in StateDir after the last
	// container that used them is gone.
	UnusedImages int `toml:"unused_images"`
	// UnusedImagesSize is what these may take of StateDir's tmpfs.
	UnusedImagesSize Size `toml:"unused_images_size"`
}

// Background is when and how the page store is filled under the policy cached.
type Background struct {
	// Delay is how long after a container runs again its fill may begin.
	Delay Duration `toml:"delay"`
	// Quiet is how long no process must have waited for the registry before
	// background requests go on.
	Quiet Duration `toml:"quiet"`
	// BytesPerSecond limits the background traffic; 0 is no limit.
	BytesPerSecond Size `toml:"bytes_per_second"`
}

// CRIU is which CRIU the node has.
type CRIU struct {
	// Path is the binary: a path, or a name that is looked up in PATH.
	Path string `toml:"path"`
	// MinimumVersion refuses restores when CRIU is older ("4.1").
	MinimumVersion string `toml:"minimum_version"`
}

// Metrics is where metrics and health are served.
type Metrics struct {
	// Address is a host:port on a loopback address; empty serves nothing.
	Address string `toml:"address"`
}

// Snapshotter is the containerd snapshots service.
type Snapshotter struct {
	// Enable starts it.
	Enable bool `toml:"enable"`
	// Socket is where it listens; default StateDir/snapshotter.sock.
	Socket string `toml:"socket"`
	// Root is where it keeps its snapshots; default CacheDir/snapshotter.
	Root string `toml:"root"`
}

// PageServer is the service that lends pages to CRIU's own lazy-pages daemons
// (thaw serve).
type PageServer struct {
	// Enable starts it.
	Enable bool `toml:"enable"`
	// Address is the IP address that page servers listen on. CRIU's protocol has
	// neither encryption nor authentication: whoever reaches an address that is no
	// loopback address reads the memory that is served there.
	Address string `toml:"address"`
}

// Default returns the configuration of a node without a file.
func Default() *Config {
	return &Config{
		StateDir:   "/run/thaw",
		CacheDir:   "/var/lib/thaw",
		Policy:     PolicyCached,
		LogLevel:   "info",
		Containerd: Containerd{Address: "/run/containerd/containerd.sock"},
		Registry: Registry{
			CertsDir:        "/etc/containerd/certs.d",
			DockerConfig:    "/root/.docker/config.json",
			Timeout:         Duration(60 * time.Second),
			MetadataTimeout: Duration(15 * time.Second),
			StallTimeout:    Duration(10 * time.Second),
		},
		Trust:      Trust{Repositories: []string{}, VerdictLifetime: Duration(time.Minute)},
		Decryption: Decryption{KeysDir: "/etc/containerd/ocicrypt/keys"},
		Limits: Limits{
			ParallelFetches:   8,
			RequestSize:       2 << 20,
			MaxMemory:         256 << 30,
			MaxState:          4 << 30,
			MaxPageIndex:      128 << 20,
			CacheSize:         32 << 30,
			MetadataCacheSize: 1 << 30,
			UnusedImages:      8,
			UnusedImagesSize:  256 << 20,
		},
		Background: Background{
			Delay: Duration(3 * time.Second),
			Quiet: Duration(200 * time.Millisecond),
		},
		CRIU:        CRIU{Path: "criu", MinimumVersion: "4.1"},
		Metrics:     Metrics{Address: "127.0.0.1:9470"},
		Snapshotter: Snapshotter{Enable: true},
		PageServer:  PageServer{Address: "127.0.0.1"},
	}
}

// Load reads a configuration file over the defaults. An empty path means
// DefaultPath, which may be missing. Unknown keys and impossible values are
// errors that name the key.
func Load(path string) (*Config, error) {
	optional := path == ""
	if optional {
		path = DefaultPath
	}
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) && optional {
		c := Default()
		return c, c.finish()
	}
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if len(p) > maxFileSize {
		return nil, fmt.Errorf("configuration %s is over the limit of %d bytes", path, maxFileSize)
	}
	c, err := Parse(p)
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// Parse reads a configuration in TOML over the defaults, as Load does.
func Parse(p []byte) (*Config, error) {
	c := Default()
	d := toml.NewDecoder(bytes.NewReader(p)).DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		return nil, explain(err)
	}
	return c, c.finish()
}

// explain turns the TOML library's errors, which draw the file over several
// lines, into one line that names key and place.
func explain(err error) error {
	var strict *toml.StrictMissingError
	if errors.As(err, &strict) && len(strict.Errors) > 0 {
		var keys []string
		for i := range strict.Errors {
			row, _ := strict.Errors[i].Position()
			keys = append(keys, fmt.Sprintf("%s (line %d)", strings.Join(strict.Errors[i].Key(), "."), row))
		}
		return fmt.Errorf("unknown key %s: correct or remove it", strings.Join(keys, ", "))
	}
	var decode *toml.DecodeError
	if errors.As(err, &decode) {
		row, col := decode.Position()
		return fmt.Errorf("line %d, column %d: %s", row, col, strings.TrimPrefix(decode.Error(), "toml: "))
	}
	return err
}

// finish fills in what depends on other keys and checks the values.
func (c *Config) finish() error {
	if c.Snapshotter.Socket == "" {
		c.Snapshotter.Socket = filepath.Join(c.StateDir, "snapshotter.sock")
	}
	if c.Snapshotter.Root == "" {
		c.Snapshotter.Root = filepath.Join(c.CacheDir, "snapshotter")
	}
	for _, p := range []struct{ key, value string }{
		{"decryption.keys_dir", c.Decryption.KeysDir},
		{"state_dir", c.StateDir},
		{"cache_dir", c.CacheDir},
		{"containerd.address", c.Containerd.Address},
		{"snapshotter.socket", c.Snapshotter.Socket},
		{"snapshotter.root", c.Snapshotter.Root},
	} {
		if !filepath.IsAbs(p.value) || filepath.Clean(p.value) == "/" {
			return fmt.Errorf("%s is %q: an absolute path is needed", p.key, p.value)
		}
	}
	if p := &c.Decryption.KeyproviderConfig; *p == "" {
		*p = cmp.Or(os.Getenv("OCICRYPT_KEYPROVIDER_CONFIG"), "/etc/containerd/ocicrypt/ocicrypt_keyprovider.conf")
	} else if !filepath.IsAbs(*p) {
		return fmt.Errorf("decryption.keyprovider_config is %q: an absolute path is needed", *p)
	}
	if d := c.Trust.VerifiersDir; d != "" && !filepath.IsAbs(d) {
		return fmt.Errorf("trust.verifiers_dir is %q: an absolute path is needed", d)
	}
	if !slices.Contains(Policies(), c.Policy) {
		return fmt.Errorf("policy is %q: use one of %s", c.Policy, strings.Join(Policies(), ", "))
	}
	for _, n := range []struct {
		key      string
		value    int64
		min, max int64
	}{
		{"limits.parallel_fetches", int64(c.Limits.ParallelFetches), 1, 256},
		{"limits.request_size", int64(c.Limits.RequestSize), 64 << 10, 64 << 20},
		{"limits.max_memory", int64(c.Limits.MaxMemory), 1, 1 << 50},
		{"limits.max_state", int64(c.Limits.MaxState), 1, 1 << 40},
		{"limits.max_page_index", int64(c.Limits.MaxPageIndex), 1, 256 << 20},
		{"limits.cache_size", int64(c.Limits.CacheSize), 0, 1 << 60},
		{"limits.metadata_cache_size", int64(c.Limits.MetadataCacheSize), 0, 1 << 60},
		{"limits.unused_images", int64(c.Limits.UnusedImages), 0, 1 << 16},
		{"limits.unused_images_size", int64(c.Limits.UnusedImagesSize), 0, 1 << 60},
		{"background.bytes_per_second", int64(c.Background.BytesPerSecond), 0, 1 << 60},
		{"background.delay", int64(c.Background.Delay), 0, int64(24 * time.Hour)},
		{"background.quiet", int64(c.Background.Quiet), 0, int64(time.Hour)},
		{"trust.verdict_lifetime", int64(c.Trust.VerdictLifetime), 0, int64(24 * time.Hour)},
		{"registry.timeout", int64(c.Registry.Timeout), int64(time.Second), int64(time.Hour)},
		{"registry.metadata_timeout", int64(c.Registry.MetadataTimeout), int64(time.Second), int64(time.Hour)},
		{"registry.stall_timeout", int64(c.Registry.StallTimeout), int64(100 * time.Millisecond), int64(time.Hour)},
	} {
		if n.value < n.min || n.value > n.max {
			return fmt.Errorf("%s is %d: it must be from %d to %d", n.key, n.value, n.min, n.max)
		}
	}
	if net.ParseIP(c.PageServer.Address) == nil {
		return fmt.Errorf("page_server.address is %q: an IP address is needed, such as 127.0.0.1", c.PageServer.Address)
	}
	return c.checkMetrics()
}

// checkMetrics keeps metrics, which name images and pods, on this machine.
func (c *Config) checkMetrics() error {
	if c.Metrics.Address == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(c.Metrics.Address)
	if err != nil {
		return fmt.Errorf("metrics.address: %w", err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("metrics.address is %q: only a loopback address is allowed", c.Metrics.Address)
	}
	return nil
}

// Socket is the path of the daemon's ttrpc socket.
func (c *Config) Socket() string { return filepath.Join(c.StateDir, "thaw.sock") }

// KeeperSocket is the path of the socket on which userfaultfds are handed over.
func (c *Config) KeeperSocket() string { return filepath.Join(c.StateDir, "keeper.sock") }
