// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"bytes"
	"fmt"
	"io"
	"os"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/typeurl/v2"
	"github.com/pelletier/go-toml/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// maxOptions bounds a TOML options file, in bytes.
const maxOptions = 1 << 20

// convertOptions turns the runtime options that a client of containerd sent into
// those that runc's task service takes. CRI hands the options table of a runtime
// that is not io.containerd.runc.v2 over as TOML, in a message of its own; the
// keys are those that the same table has for runc (BinaryName, SystemdCgroup,
// Root, ...). Options of any other kind pass unchanged.
func convertOptions(in *anypb.Any) (*anypb.Any, error) {
	if in.GetValue() == nil || !typeurl.Is(in, &runtimeoptions.Options{}) {
		return in, nil
	}
	var generic runtimeoptions.Options
	if err := in.UnmarshalTo(&generic); err != nil {
		return nil, fmt.Errorf("runtime options: %w", err)
	}
	body := generic.ConfigBody
	if generic.ConfigPath != "" {
		var err error
		if body, err = readBounded(generic.ConfigPath, maxOptions); err != nil {
			return nil, fmt.Errorf("runtime options: %w", err)
		}
	}
	runc, err := parseOptions(body)
	if err != nil {
		return nil, err
	}
	return typeurl.MarshalAnyToProto(runc)
}

func parseOptions(body []byte) (*runcoptions.Options, error) {
	// The keys are the field names of runc's options message. TypeUrl and
	// ConfigPath are CRI's own and come along in the body.
	var runc runcoptions.Options
	if err := toml.NewDecoder(bytes.NewReader(body)).Decode(&runc); err != nil {
		return nil, fmt.Errorf("runtime options of handler thaw in containerd's config: %w", err)
	}
	return &runc, nil
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return b, nil
}

// convertOptionsStream does for a marshalled Any on a stream what convertOptions
// does; an empty stream stays empty.
func convertOptionsStream(r io.Reader) (io.Reader, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxOptions))
	if err != nil || len(b) == 0 {
		return bytes.NewReader(nil), err
	}
	var in anypb.Any
	if err := proto.Unmarshal(b, &in); err != nil {
		return nil, fmt.Errorf("runtime options: %w", err)
	}
	out, err := convertOptions(&in)
	if err != nil {
		return nil, err
	}
	if b, err = proto.Marshal(out); err != nil {
		return nil, err
	}
	return bytes.NewReader(b), nil
}
