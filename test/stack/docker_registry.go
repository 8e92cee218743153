// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// DockerRegistryAddress is where StartDockerRegistry's registry listens.
const DockerRegistryAddress = "127.0.0.1:5001"

const dockerRegistryConfig = `version: 0.1
log: {level: warn}
storage:
  filesystem: {rootdirectory: %q}
  delete: {enabled: true}
http: {addr: %q}
`

// StartDockerRegistry starts Debian's docker-registry, an independent implementation, with its data in the stack's folder, and
// tells containerd that it speaks plain HTTP. The caller must end the process it gets.
func (s *Stack) StartDockerRegistry(ctx context.Context) (*Process, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	config := "/run/stack/docker-registry.yml"
	err := writeFile(config, fmt.Sprintf(dockerRegistryConfig, filepath.Join(s.Dir, "docker-registry"), DockerRegistryAddress))
	if err != nil {
		return nil, err
	}
	if err := writeFile("/etc/containerd/certs.d/"+DockerRegistryAddress+"/hosts.toml", fmt.Sprintf(hosts, DockerRegistryAddress)); err != nil {
		return nil, err
	}
	log := filepath.Join(s.Logs(), "docker-registry.log")
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(filepath.Join(s.Bin, "docker-registry"), "serve", config)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{Name: "docker-registry", cmd: cmd, log: log, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	// It knows no readiness protocol: ask it until it answers, or ends.
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-p.done:
			stop(fmt.Errorf("docker-registry ended (%w): %s", p.exit(), p.lastLog()))
		case <-ctx.Done():
		}
	}()
	if _, err := FirstReply(ctx, "http://"+DockerRegistryAddress+"/v2/"); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return nil, fmt.Errorf("%w (killed: %v)", err, p.Kill())
	}
	return p, nil
}
