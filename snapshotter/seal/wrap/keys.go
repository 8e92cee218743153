// SPDX-License-Identifier: Apache-2.0

package wrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containers/ocicrypt/config"
	"github.com/containers/ocicrypt/keywrap/jwe"
	"github.com/containers/ocicrypt/keywrap/keyprovider"
	"github.com/containers/ocicrypt/utils"

	"thaw.dev/thaw/snapshotter/seal"
)

// maxKeys bounds the files in a keys folder.
const maxKeys = 1 << 8

// Keys are what a node opens encrypted checkpoints with. They are read anew each time, so
// that a key which is taken away from the node opens nothing any more.
type Keys struct {
	// Dir is a folder with private keys in PEM, DER or JWK; other files in it do no
	// harm. It may be missing.
	Dir string
	// ProviderConfig is the file that names key providers. It may be missing.
	ProviderConfig string
}

// Unwrap returns the key that a checkpoint's annotations hold. An error is one line that
// says for whom the checkpoint is encrypted and what this node lacks; it has the class
// PermissionDenied if the node has no key for it.
func (k *Keys) Unwrap(ctx context.Context, annotations map[string]string) (seal.Key, error) {
	var why []string
	for _, scheme := range schemes(annotations) {
		list, err := wrapped(annotations, scheme)
		if err != nil {
			return seal.Key{}, err
		}
		var p []byte
		if name, ok := strings.CutPrefix(scheme, schemeProvider); ok {
			p, err = k.provided(ctx, name, list)
		} else if scheme == schemeJWE {
			p, err = k.private(list)
		} else {
			err = fmt.Errorf("%.64q is a scheme that thaw does not read", scheme)
		}
		if err == nil {
			return decodeKey(p)
		}
		if ctx.Err() != nil {
			return seal.Key{}, ctx.Err()
		}
		why = append(why, err.Error())
	}
	return seal.Key{}, fmt.Errorf("the checkpoint is encrypted for %.200q and this node cannot open it (%.400s): give the node a key, or encrypt the checkpoint for one that it has: %w",
		strings.Join(Describe(annotations), ", "), strings.Join(why, "; "), errdefs.ErrPermissionDenied)
}

// private opens one of the wrapped keys with one of the private keys.
func (k *Keys) private(list [][]byte) ([]byte, error) {
	files, err := k.read()
	if err != nil {
		return nil, err
	}
	for _, f := range files { // one at a time: the first that is no key would end it
		dc := &config.DecryptConfig{Parameters: map[string][][]byte{"privkeys": {f}, "privkeys-passwords": {nil}}}
		for _, w := range list {
			if p, err := jwe.NewKeyWrapper().UnwrapKey(dc, w); err == nil {
				return p, nil
			}
		}
	}
	keys := 0
	for _, f := range files {
		if ok, _ := utils.IsPrivateKey(f, nil); ok {
			keys++
		}
	}
	if keys == 0 {
		return nil, fmt.Errorf("there is no private key in %s", k.Dir)
	}
	return nil, fmt.Errorf("none of the %d private keys in %s opens it", keys, k.Dir)
}

// read reads the files of the folder, not of those below it.
func (k *Keys) read() (files [][]byte, err error) {
	if k.Dir == "" {
		return nil, errors.New("no folder for private keys is configured")
	}
	entries, err := os.ReadDir(k.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if len(entries) > maxKeys {
		return nil, fmt.Errorf("%s has more than %d files", k.Dir, maxKeys)
	}
	for _, e := range entries {
		path := filepath.Join(k.Dir, e.Name())
		// Through links, as the files of a mounted Secret are some; but to no pipe that could block.
		if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
			continue
		}
		p, err := readFile(path)
		if err != nil {
			return nil, err
		}
		files = append(files, p)
	}
	return files, nil
}

// provided has a key provider open one of the wrapped keys.
func (k *Keys) provided(ctx context.Context, name string, list [][]byte) ([]byte, error) {
	known, err := providers(k.ProviderConfig)
	if err != nil {
		return nil, err
	}
	p, ok := known[name]
	if !ok {
		return nil, fmt.Errorf("key provider %.64q is not in %q", name, k.ProviderConfig)
	}
	for _, w := range list {
		out, aerr := ask(ctx, name, p, keyprovider.KeyProviderKeyWrapProtocolInput{
			Operation:       keyprovider.OpKeyUnwrap,
			KeyUnwrapParams: keyprovider.KeyUnwrapParams{Dc: &config.DecryptConfig{Parameters: map[string][][]byte{name: {[]byte("Enabled")}}}, Annotation: w},
		})
		if aerr == nil && len(out.KeyUnwrapResults.OptsData) > 0 {
			return out.KeyUnwrapResults.OptsData, nil
		}
		if err = aerr; err == nil {
			err = fmt.Errorf("key provider %.64q opened nothing", name)
		}
	}
	return nil, err
}
