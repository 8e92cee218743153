// SPDX-License-Identifier: Apache-2.0

package wrap

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	providerconfig "github.com/containers/ocicrypt/config/keyprovider-config"
	"github.com/containers/ocicrypt/keywrap/keyprovider"
	providerapi "github.com/containers/ocicrypt/utils/keyprovider"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// providerTimeout is how long a key provider may take.
	providerTimeout = 30 * time.Second
	// maxAnswer bounds what a key provider answers, in bytes.
	maxAnswer = 1 << 20
	// maxFile bounds a configuration or key file, in bytes.
	maxFile = 1 << 20
)

// providers reads the configuration of key providers (ocicrypt_keyprovider.conf). A
// missing file has none.
func providers(path string) (map[string]providerconfig.KeyProviderAttrs, error) {
	if path == "" {
		return nil, nil
	}
	p, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("key providers: %w", err)
	}
	var c providerconfig.OcicryptConfig
	if err := json.Unmarshal(p, &c); err != nil {
		return nil, fmt.Errorf("key providers: %s: %w: correct it", path, err)
	}
	return c.KeyProviderConfig, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(p) > maxFile {
		err = fmt.Errorf("%s is over the limit of %d bytes", path, maxFile)
	}
	return p, err
}

// ask has a key provider wrap or unwrap. The library's own way has no end if the
// provider does not answer.
func ask(ctx context.Context, name string, p providerconfig.KeyProviderAttrs, input keyprovider.KeyProviderKeyWrapProtocolInput) (_ *keyprovider.KeyProviderKeyWrapProtocolOutput, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("key provider %.64q: %w", name, err)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, providerTimeout)
	defer cancel()
	in, err := json.Marshal(input)
	if err != nil {
		return nil, err
	}
	var out []byte
	switch {
	case p.Command != nil:
		out, err = run(ctx, p.Command, in)
	case p.Grpc != "":
		out, err = call(ctx, p, input.Operation, in)
	default:
		err = errors.New("its configuration has neither cmd nor grpc")
	}
	if err != nil {
		return nil, err
	}
	var answer keyprovider.KeyProviderKeyWrapProtocolOutput
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("its answer: %w", err)
	}
	return &answer, nil
}

func run(ctx context.Context, c *providerconfig.Command, in []byte) ([]byte, error) {
	cmd := exec.CommandContext(ctx, c.Path, c.Args...)
	cmd.WaitDelay = time.Second // for what holds its output open
	cmd.Stdin = bytes.NewReader(in)
	stdout, stderr := &limited{left: maxAnswer}, &limited{left: 1 << 10}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("%s: %w: %q", c.Path, err, bytes.TrimSpace(stderr.p.Bytes()))
	}
	return stdout.p.Bytes(), nil
}

// limited keeps the beginning of what is written.
type limited struct {
	p    bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	l.p.Write(p[:n])
	return len(p), nil
}

func call(ctx context.Context, p providerconfig.KeyProviderAttrs, op keyprovider.KeyProviderKeyWrapProtocolOperation, in []byte) (_ []byte, err error) {
	creds, err := transport(p.GrpcTLS)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(p.Grpc, grpc.WithTransportCredentials(creds), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := providerapi.NewKeyProviderServiceClient(conn)
	method := client.UnWrapKey
	if op == keyprovider.OpKeyWrap {
		method = client.WrapKey
	}
	out, err := method(ctx, &providerapi.KeyProviderKeyWrapProtocolInput{KeyProviderKeyWrapProtocolInput: in})
	if err != nil {
		return nil, fmt.Errorf("%s: %.500q", p.Grpc, err.Error()) // which may be of many lines
	}
	return out.GetKeyProviderKeyWrapProtocolOutput(), nil
}

func transport(c *providerconfig.GrpcTLS) (credentials.TransportCredentials, error) {
	if c == nil {
		return insecure.NewCredentials(), nil
	}
	t := &tls.Config{ServerName: c.ServerName, InsecureSkipVerify: c.InsecureSkipVerify}
	if c.RootCAFile != "" {
		p, err := readFile(c.RootCAFile)
		if err != nil {
			return nil, err
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(p) {
			return nil, fmt.Errorf("%s holds no certificate", c.RootCAFile)
		}
	}
	if c.CertFile != "" && c.KeyFile != "" {
		cert, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
		if err != nil {
			return nil, err
		}
		t.Certificates = []tls.Certificate{cert}
	}
	return credentials.NewTLS(t), nil
}
