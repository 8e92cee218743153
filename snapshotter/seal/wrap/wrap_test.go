// SPDX-License-Identifier: Apache-2.0

package wrap

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	providerconfig "github.com/containers/ocicrypt/config/keyprovider-config"
	"github.com/containers/ocicrypt/keywrap/keyprovider"
	providerapi "github.com/containers/ocicrypt/utils/keyprovider"
	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc"

	"thaw.dev/thaw/snapshotter/seal"
)

// providerEnv makes the test binary a key provider that is run as a command.
const providerEnv = "THAW_TEST_KEY_PROVIDER"

func TestMain(m *testing.M) {
	switch os.Getenv(providerEnv) {
	case "":
		os.Exit(m.Run())
	case "hang":
		select {}
	case "fail":
		fmt.Fprintln(os.Stderr, "the vault\nis closed")
		os.Exit(1)
	default:
		p, err := io.ReadAll(os.Stdin)
		if err == nil {
			p, err = provide(p)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Stdout.Write(p)
	}
}

// provide is a key provider that turns bytes around.
func provide(p []byte) ([]byte, error) {
	var in keyprovider.KeyProviderKeyWrapProtocolInput
	if err := json.Unmarshal(p, &in); err != nil {
		return nil, err
	}
	turn := func(p []byte) []byte {
		out := make([]byte, len(p))
		for i := range p {
			out[i] = ^p[i]
		}
		return out
	}
	var out keyprovider.KeyProviderKeyWrapProtocolOutput
	if in.Operation == keyprovider.OpKeyWrap {
		out.KeyWrapResults.Annotation = turn(in.KeyWrapParams.OptsData)
	} else {
		out.KeyUnwrapResults.OptsData = turn(in.KeyUnwrapParams.Annotation)
	}
	return json.Marshal(out)
}

// keyPair writes a public key, and a private key into a folder of its own.
func keyPair(t testing.TB, key crypto.Signer) (public, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "keys")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	pub, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	priv, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	public = filepath.Join(t.TempDir(), "pub.pem")
	write(t, public, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub}))
	write(t, filepath.Join(dir, "key.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: priv}))
	return public, dir
}

func write(t testing.TB, path string, p []byte) {
	t.Helper()
	if err := os.WriteFile(path, p, 0o600); err != nil {
		t.Fatal(err)
	}
}

func newRSA(t testing.TB) crypto.Signer {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func newEC(t testing.TB) crypto.Signer {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func envelope(t testing.TB, config string, recipients ...string) *Envelope {
	t.Helper()
	e, err := NewEnvelope(t.Context(), recipients, config)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestRecipients(t *testing.T) {
	rsaPublic, rsaDir := keyPair(t, newRSA(t))
	ecPublic, ecDir := keyPair(t, newEC(t))
	_, otherDir := keyPair(t, newRSA(t))
	jwk, err := (&jose.JSONWebKey{Key: newEC(t).Public(), KeyID: "node\x1b-7", Algorithm: string(jose.ECDH_ES_A256KW)}).MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	jwkPublic := filepath.Join(t.TempDir(), "pub.jwk")
	write(t, jwkPublic, jwk)

	e := envelope(t, "", "jwe:"+rsaPublic, "jwe:"+ecPublic, "jwe:"+jwkPublic)
	a, err := Annotations(e.Annotations)
	if err != nil || !maps.Equal(a, e.Annotations) {
		t.Fatalf("%v, %v", a, err)
	}
	if got := strings.Join(Describe(a), ","); got != "jwe RSA-OAEP,jwe ECDH-ES+A256KW,jwe ECDH-ES+A256KW key node\x1b-7" {
		t.Errorf("described as %q", got)
	}
	if got := Describe(envelope(t, "", "jwe:"+ecPublic).Annotations); len(got) != 1 || got[0] != "jwe ECDH-ES+A256KW" {
		t.Errorf("a single recipient is described as %q", got)
	}
	// What else lies in a folder of keys does no harm.
	write(t, filepath.Join(rsaDir, "README"), []byte("keys of this node"))
	write(t, filepath.Join(rsaDir, "a-public.pem"), jwk)
	if err := os.Mkdir(filepath.Join(rsaDir, "old"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{rsaDir, ecDir} {
		if got, err := (&Keys{Dir: dir}).Unwrap(t.Context(), a); err != nil || got != e.Key {
			t.Errorf("%s: %v", dir, err)
		}
	}
	for dir, want := range map[string]string{
		otherDir:                                "none of the 1 private keys in " + otherDir,
		filepath.Join(t.TempDir(), "not-there"): "there is no private key in",
		"":                                      "no folder for private keys is configured",
	} {
		_, err := (&Keys{Dir: dir}).Unwrap(t.Context(), a)
		if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "jwe RSA-OAEP") || strings.ContainsAny(err.Error(), "\n\x1b") {
			t.Errorf("%s: %v", dir, err)
		}
	}
	// A key that is taken away opens nothing any more.
	if err := os.Remove(filepath.Join(ecDir, "key.pem")); err != nil {
		t.Fatal(err)
	}
	if _, err := (&Keys{Dir: ecDir}).Unwrap(t.Context(), a); !errdefs.IsPermissionDenied(err) {
		t.Errorf("without its key: %v", err)
	}
}

func TestRefusedRecipients(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	write(t, text, []byte("hello"))
	for recipient, want := range map[string]string{
		"jwe:" + text:    "holds no public key",
		"jwe:/not/there": "no such file",
		"jwe:":           "use jwe:FILE",
		"pgp:me":         "use jwe:FILE",
		"key.pem":        "use jwe:FILE",
		"provider:":      "use jwe:FILE",
		"provider:vault": "has no such key provider",
	} {
		_, err := NewEnvelope(t.Context(), []string{recipient}, filepath.Join(t.TempDir(), "none.conf"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", recipient, err, want)
		}
	}
	if _, err := NewEnvelope(t.Context(), nil, ""); !errors.Is(err, ErrFormat) {
		t.Errorf("for nobody: %v", err)
	}
}

type service struct {
	providerapi.UnimplementedKeyProviderServiceServer
}

func (service) WrapKey(_ context.Context, in *providerapi.KeyProviderKeyWrapProtocolInput) (*providerapi.KeyProviderKeyWrapProtocolOutput, error) {
	if os.Getenv(providerEnv) == "fail" {
		return nil, errors.New("the vault\nis closed")
	}
	p, err := provide(in.GetKeyProviderKeyWrapProtocolInput())
	return &providerapi.KeyProviderKeyWrapProtocolOutput{KeyProviderKeyWrapProtocolOutput: p}, err
}

func (s service) UnWrapKey(ctx context.Context, in *providerapi.KeyProviderKeyWrapProtocolInput) (*providerapi.KeyProviderKeyWrapProtocolOutput, error) {
	return s.WrapKey(ctx, in)
}

func TestProviders(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	providerapi.RegisterKeyProviderServiceServer(s, service{})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	conf := filepath.Join(t.TempDir(), "providers.conf")
	p, err := json.Marshal(providerconfig.OcicryptConfig{KeyProviderConfig: map[string]providerconfig.KeyProviderAttrs{
		"command": {Command: &providerconfig.Command{Path: exe}}, "service": {Grpc: l.Addr().String()}, "neither": {},
	}})
	if err != nil {
		t.Fatal(err)
	}
	write(t, conf, p)
	t.Setenv(providerEnv, "work")
	node := &Keys{Dir: t.TempDir(), ProviderConfig: conf}
	sealed := make(map[string]map[string]string)
	for _, name := range []string{"command", "service"} {
		e := envelope(t, conf, "provider:"+name+":some-key")
		if got, err := node.Unwrap(t.Context(), e.Annotations); err != nil || got != e.Key {
			t.Errorf("%s: %v", name, err)
		}
		if got := Describe(e.Annotations); len(got) != 1 || got[0] != "provider."+name {
			t.Errorf("%s is described as %q", name, got)
		}
		_, err := (&Keys{Dir: t.TempDir(), ProviderConfig: "/not/there"}).Unwrap(t.Context(), e.Annotations)
		if !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "is not in \"/not/there\"") {
			t.Errorf("%s, not configured: %v", name, err)
		}
		sealed[name] = e.Annotations
	}
	if _, err := NewEnvelope(t.Context(), []string{"provider:neither"}, conf); err == nil || !strings.Contains(err.Error(), "neither cmd nor grpc") {
		t.Errorf("got %v", err)
	}
	t.Setenv(providerEnv, "fail")
	for name, a := range sealed {
		if _, err := node.Unwrap(t.Context(), a); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), `the vault\nis closed`) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s fails: %v", name, err)
		}
	}
	t.Setenv(providerEnv, "hang")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := node.Unwrap(ctx, sealed["command"]); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a provider that hangs: %v", err)
	}
	write(t, conf, []byte("{"))
	if _, err := node.Unwrap(t.Context(), sealed["command"]); err == nil || !strings.Contains(err.Error(), conf) {
		t.Errorf("a damaged configuration: %v", err)
	}
}

// TestRefusedAnnotations: what is wrong with annotations is told and does no harm.
func TestRefusedAnnotations(t *testing.T) {
	public, dir := keyPair(t, newEC(t))
	good := envelope(t, "", "jwe:"+public).Annotations
	with := func(name, value string) map[string]string {
		a := maps.Clone(good)
		a[name] = value
		return a
	}
	b64 := base64.StdEncoding.EncodeToString
	for name, tc := range map[string]struct {
		a    map[string]string
		want string
	}{
		"none":           {map[string]string{annotationOptions: good[annotationOptions]}, "there is no key"},
		"too large":      {with(annotationPrefix+"jwe", strings.Repeat("A", maxAnnotations)), "over the limit"},
		"no options":     {with(annotationOptions, ""), annotationOptions},
		"no base64":      {with(annotationOptions, "%"), annotationOptions},
		"another cipher": {with(annotationOptions, b64([]byte(`{"cipher":"AES_256_CTR_HMAC_SHA256"}`))), "cipher \"AES_256_CTR_HMAC_SHA256\" is not supported"},
	} {
		if _, err := Annotations(tc.a); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	for name, tc := range map[string]struct {
		value, want string
	}{
		"no base64":     {"%", "illegal base64"},
		"too many":      {strings.Repeat(b64([]byte("x"))+",", maxWrapped+1), "over the limit"},
		"no JWE":        {b64([]byte("x")), "none of the 1 private keys"},
		"another thing": {b64([]byte(`{"protected":"","encrypted_key":"","iv":"","ciphertext":"","tag":""}`)), "none of the 1 private keys"},
	} {
		if _, err := (&Keys{Dir: dir}).Unwrap(t.Context(), with(annotationPrefix+"jwe", tc.value)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	for _, p := range []string{"", "x", `{"symkey":"AAAA"}`} {
		if _, err := decodeKey([]byte(p)); !errors.Is(err, ErrFormat) {
			t.Errorf("key %q: %v", p, err)
		}
	}
	if _, err := (&Keys{Dir: dir}).Unwrap(t.Context(), map[string]string{annotationPrefix + "pgp": "AAAA"}); !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), "does not read") {
		t.Errorf("another scheme: %v", err)
	}
}

// FuzzUnwrap: annotations of an image lead to its key or an error of one line.
func FuzzUnwrap(f *testing.F) {
	public, dir := keyPair(f, newEC(f))
	e, err := NewEnvelope(context.Background(), []string{"jwe:" + public}, "")
	if err != nil {
		f.Fatal(err)
	}
	p, err := base64.StdEncoding.DecodeString(e.Annotations[annotationPrefix+schemeJWE])
	if err != nil {
		f.Fatal(err)
	}
	f.Add("jwe", p)
	f.Add("provider.x", []byte("{}"))
	f.Add("jwe", []byte(`{"recipients":[{"header":{"alg":"RSA-OAEP"},"encrypted_key":"AA"}],"protected":"e30"}`))
	keys := &Keys{Dir: dir}
	f.Fuzz(func(t *testing.T, scheme string, wrapped []byte) {
		a, err := Annotations(map[string]string{
			annotationPrefix + scheme: base64.StdEncoding.EncodeToString(wrapped), annotationOptions: e.Annotations[annotationOptions],
		})
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("error of no class: %v", err)
			}
			return
		}
		Describe(a)
		got, err := keys.Unwrap(t.Context(), a)
		if err == nil && got != e.Key && got == (seal.Key{}) {
			t.Fatal("no error and no key")
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Fatalf("more than a line: %q", err)
		}
	})
}
