// SPDX-License-Identifier: Apache-2.0

// Package wrap hands the key of an encrypted checkpoint to those who may open it, as
// encrypted container images do it: wrapped for each recipient, in annotations of the layers,
// with the code of ocicrypt and the keys that a node has for containerd's image decryption.
//
// There are two schemes. "jwe" wraps for public keys (RFC 7516); "provider" leaves it to
// a program or service of the administrator's, such as one that asks a key management
// service (ocicrypt's docs/keyprovider.md).
package wrap

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"

	"github.com/containers/ocicrypt/blockcipher"

	"thaw.dev/thaw/snapshotter/seal"
)

const (
	// annotationPrefix is what the annotations with wrapped keys begin with; the scheme follows.
	annotationPrefix = "org.opencontainers.image.enc.keys."
	// annotationOptions has what is no secret: the cipher.
	annotationOptions = "org.opencontainers.image.enc.pubopts"

	schemeJWE      = "jwe"
	schemeProvider = "provider."

	// cipher names what package seal does, so that tools which know the annotations but not
	// checkpoints do not take the layers for their own.
	cipher blockcipher.LayerCipherType = "AES_256_GCM_THAW_V1"

	// maxAnnotations bounds a checkpoint's wrapped keys in bytes, and with that how often a node tries a
	// private key: more than 50 recipients with keys of 4096 bits.
	maxAnnotations = 64 << 10
	// maxWrapped bounds the wrapped keys in one annotation, a list.
	maxWrapped = 64
)

// ErrFormat is wrapped by errors about annotations that are not as they must be.
var ErrFormat = errors.New("invalid annotations of an encrypted checkpoint")

// Envelope is a checkpoint's key and what to write into the image for it.
type Envelope struct {
	Key seal.Key
	// Annotations belong to each layer that the key opens.
	Annotations map[string]string
}

// Annotations returns those of a layer's annotations that have to do with its encryption.
// Errors wrap ErrFormat.
func Annotations(all map[string]string) (map[string]string, error) {
	out := make(map[string]string)
	size := 0
	for name, value := range all {
		if strings.HasPrefix(name, annotationPrefix) {
			out[name] = value
			size += len(name) + len(value)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: there is no key", ErrFormat)
	}
	if size > maxAnnotations {
		return nil, fmt.Errorf("%w: keys of %d bytes are over the limit of %d", ErrFormat, size, maxAnnotations)
	}
	var public blockcipher.PublicLayerBlockCipherOptions
	p, err := base64.StdEncoding.DecodeString(all[annotationOptions])
	if err == nil {
		err = json.Unmarshal(p, &public)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %.200v", ErrFormat, annotationOptions, err)
	}
	if public.CipherType != cipher {
		return nil, fmt.Errorf("%w: cipher %.64q is not supported (this thaw knows %s): use a thaw that knows it", ErrFormat, public.CipherType, cipher)
	}
	out[annotationOptions] = all[annotationOptions]
	return out, nil
}

// wrapped returns the wrapped keys of a scheme, decoded.
func wrapped(annotations map[string]string, scheme string) ([][]byte, error) {
	value := annotations[annotationPrefix+scheme]
	if value == "" {
		return nil, nil
	}
	list := strings.Split(value, ",")
	if len(list) > maxWrapped {
		return nil, fmt.Errorf("%w: %d keys for %.64q are over the limit of %d", ErrFormat, len(list), scheme, maxWrapped)
	}
	out := make([][]byte, len(list))
	for i, s := range list {
		p, err := base64.StdEncoding.DecodeString(s)
		if err != nil {
			return nil, fmt.Errorf("%w: key for %.64q: %w", ErrFormat, scheme, err)
		}
		out[i] = p
	}
	return out, nil
}

// schemes returns the schemes of an image's wrapped keys, sorted.
func schemes(annotations map[string]string) (out []string) {
	for name := range annotations {
		if scheme, ok := strings.CutPrefix(name, annotationPrefix); ok {
			out = append(out, scheme)
		}
	}
	sort.Strings(out)
	return out
}

// Describe says for whom a checkpoint is encrypted, a line for each recipient. What it
// returns is the image's word and may hold anything.
func Describe(annotations map[string]string) (out []string) {
	for _, scheme := range schemes(annotations) {
		list, err := wrapped(annotations, scheme)
		if err != nil || scheme != schemeJWE {
			out = append(out, scheme)
			continue
		}
		for _, p := range list {
			out = append(out, recipientsOf(p)...)
		}
	}
	return out
}

// recipientsOf lists the recipients of a JWE in its JSON form (RFC 7516, 7.2).
func recipientsOf(p []byte) []string {
	type header struct {
		Algorithm string `json:"alg"`
		KeyID     string `json:"kid"`
	}
	var jwe struct {
		Protected  string `json:"protected"`
		Header     header `json:"header"`
		Recipients []struct {
			Header header `json:"header"`
		} `json:"recipients"`
	}
	if err := json.Unmarshal(p, &jwe); err != nil {
		return []string{schemeJWE}
	}
	var protected header // of a single recipient's algorithm
	if p, err := base64.RawURLEncoding.DecodeString(jwe.Protected); err == nil {
		_ = json.Unmarshal(p, &protected) // what is no JSON tells nothing
	}
	all := []header{jwe.Header}
	if len(jwe.Recipients) > 0 {
		all = all[:0]
		for _, r := range jwe.Recipients {
			all = append(all, r.Header)
		}
	}
	out := make([]string, 0, len(all))
	for _, h := range all {
		line := schemeJWE
		if h.Algorithm == "" {
			h.Algorithm = protected.Algorithm
		}
		if h.KeyID == "" {
			h.KeyID = protected.KeyID
		}
		if h.Algorithm != "" {
			line += " " + h.Algorithm
		}
		if h.KeyID != "" {
			line += " key " + h.KeyID
		}
		out = append(out, line)
	}
	return out
}

// decodeKey is the checkpoint's key in what was unwrapped.
func decodeKey(p []byte) (seal.Key, error) {
	var private blockcipher.PrivateLayerBlockCipherOptions
	if err := json.Unmarshal(p, &private); err != nil {
		return seal.Key{}, fmt.Errorf("%w: what a key opens is no key: %w", ErrFormat, err)
	}
	if len(private.SymmetricKey) != seal.KeySize {
		return seal.Key{}, fmt.Errorf("%w: the key has %d bytes instead of %d", ErrFormat, len(private.SymmetricKey), seal.KeySize)
	}
	return seal.Key(private.SymmetricKey), nil
}
