// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"os"

	"github.com/docker/cli/cli/config/configfile"
)

// loadNamed reads a docker configuration under a name of the admin's choice. A
// missing file holds no credentials.
func loadNamed(path string) (*configfile.ConfigFile, error) {
	file := configfile.New(path)
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return file, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return file, file.LoadFromReader(f)
}
