// SPDX-License-Identifier: Apache-2.0

package wrap

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/containers/ocicrypt/blockcipher"
	"github.com/containers/ocicrypt/config"
	"github.com/containers/ocicrypt/keywrap/jwe"
	"github.com/containers/ocicrypt/keywrap/keyprovider"
	"github.com/containers/ocicrypt/utils"

	"thaw.dev/thaw/snapshotter/seal"
)

// NewEnvelope makes the key of a new checkpoint and wraps it for recipients, at least one,
// each in the syntax that ctr, nerdctl and skopeo have: jwe:FILE with a public key in
// PEM, DER or JWK, or provider:NAME or provider:NAME:PARAMETER for a provider of the
// configuration file. Errors name the recipient.
func NewEnvelope(ctx context.Context, recipients []string, providerConfig string) (*Envelope, error) {
	e := &Envelope{Key: seal.NewKey(), Annotations: make(map[string]string)}
	private, err := json.Marshal(blockcipher.PrivateLayerBlockCipherOptions{SymmetricKey: e.Key[:]})
	if err != nil {
		return nil, err
	}
	public, err := json.Marshal(blockcipher.PublicLayerBlockCipherOptions{CipherType: cipher})
	if err != nil {
		return nil, err
	}
	e.Annotations[annotationOptions] = base64.StdEncoding.EncodeToString(public)

	ec := &config.EncryptConfig{Parameters: make(map[string][][]byte)}
	var names []string // of providers
	for _, r := range recipients {
		scheme, value, _ := strings.Cut(r, ":")
		switch {
		case scheme == schemeJWE && value != "":
			p, err := publicKey(value)
			if err != nil {
				return nil, fmt.Errorf("recipient %q: %w", r, err)
			}
			ec.Parameters["pubkeys"] = append(ec.Parameters["pubkeys"], p)
		case scheme+"." == schemeProvider && value != "":
			name, parameter, ok := strings.Cut(value, ":")
			if !ok {
				parameter = "Enabled" // as ocicrypt has it
			}
			if ec.Parameters[name] == nil {
				names = append(names, name)
			}
			ec.Parameters[name] = append(ec.Parameters[name], []byte(parameter))
		default:
			return nil, fmt.Errorf("recipient %q is not understood: use jwe:FILE with a public key, or provider:NAME", r)
		}
	}
	if len(ec.Parameters["pubkeys"]) > 0 {
		p, err := jwe.NewKeyWrapper().WrapKeys(ec, private)
		if err != nil {
			return nil, fmt.Errorf("key of the checkpoint: %w", err)
		}
		e.add(schemeJWE, p)
	}
	if err := e.addProviders(ctx, names, providerConfig, ec, private); err != nil {
		return nil, err
	}
	// What could not be read again had better not be written.
	if _, err := Annotations(e.Annotations); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Envelope) add(scheme string, wrapped []byte) {
	e.Annotations[annotationPrefix+scheme] = base64.StdEncoding.EncodeToString(wrapped)
}

func (e *Envelope) addProviders(ctx context.Context, names []string, path string, ec *config.EncryptConfig, private []byte) error {
	if len(names) == 0 {
		return nil
	}
	known, err := providers(path)
	if err != nil {
		return err
	}
	for _, name := range names {
		p, ok := known[name]
		if !ok {
			return fmt.Errorf("recipient provider:%s: %q has no such key provider: add it, or name another file in decryption.keyprovider_config", name, path)
		}
		out, err := ask(ctx, name, p, keyprovider.KeyProviderKeyWrapProtocolInput{
			Operation:     keyprovider.OpKeyWrap,
			KeyWrapParams: keyprovider.KeyWrapParams{Ec: ec, OptsData: private},
		})
		if err != nil {
			return err
		}
		if len(out.KeyWrapResults.Annotation) == 0 {
			return fmt.Errorf("key provider %q wrapped nothing", name)
		}
		e.add(schemeProvider+name, out.KeyWrapResults.Annotation)
	}
	return nil
}

func publicKey(path string) ([]byte, error) {
	p, err := readFile(path)
	if err != nil {
		return nil, err
	}
	if !utils.IsPublicKey(p) {
		return nil, fmt.Errorf("%s holds no public key in PEM, DER or JWK", path)
	}
	return p, nil
}
