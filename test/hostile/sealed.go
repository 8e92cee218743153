// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/base64"
	"fmt"
	"strings"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
)

// sealedTricks say that something is encrypted which is not.
func sealedTricks() []Trick {
	encrypted := func(options string, keys map[string]string) func(*Image) {
		return func(i *Image) {
			i.Manifest = func(m *v1.Manifest) {
				for n := range m.Layers {
					m.Layers[n].MediaType += checkpoint.EncryptedSuffix
					m.Layers[n].Annotations = keys
				}
				if keys != nil {
					keys["org.opencontainers.image.enc.pubopts"] = base64.StdEncoding.EncodeToString([]byte(options))
				}
			}
		}
	}
	const good = `{"cipher":"AES_256_GCM_THAW_V1"}`
	const prefix = "org.opencontainers.image.enc.keys."
	thousands := make(map[string]string)
	for n := range 1000 {
		thousands[fmt.Sprint(prefix, "scheme", n)] = "a2V5"
	}
	return []Trick{
		{Name: "some-layers-encrypted", Make: func(i *Image) {
			i.Manifest = func(m *v1.Manifest) { m.Layers[stateLayer].MediaType += checkpoint.EncryptedSuffix }
		}, Says: "1 of 3 layers are encrypted"},
		{Name: "encrypted-for-nobody", Make: encrypted("", nil), Says: "there is no key"},
		{Name: "encrypted-by-an-unknown-scheme", Make: encrypted(good, map[string]string{prefix + "evil\x1b[2J": "a2V5"}), Says: `evil\x1b[2J`},
		{Name: "encrypted-by-a-provider-of-the-node", Make: encrypted(good, map[string]string{prefix + "provider.../../bin/sh": "a2V5"}), Says: "provider.../../bin/sh"},
		{Name: "encrypted-with-a-huge-key", Make: encrypted(good, map[string]string{prefix + "jwe": strings.Repeat("A", 1<<20)}), Says: "over the limit of 65536"},
		{Name: "encrypted-with-endless-options", Make: encrypted(`{"cipher":`+strings.Repeat("7", 1<<18)+`}`, map[string]string{prefix + "jwe": "a2V5"}), Says: "enc.pubopts: json: cannot unmarshal number into"},
		{Name: "encrypted-for-thousands", Make: encrypted(good, thousands), Says: "cannot open it"},
	}
}
