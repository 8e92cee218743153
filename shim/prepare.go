// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runc "github.com/containerd/go-runc"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/criulog"
	"thaw.dev/thaw/criu/lazypages"
	"thaw.dev/thaw/shim/guard"
	"thaw.dev/thaw/shim/headstart"
	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/keeper"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/premount"
)

const (
	// criuConfigAnnotation names the configuration file that runc hands to CRIU.
	// CRIU reads it after the options that runc itself sets.
	criuConfigAnnotation = "org.criu.config"

	// smallMemory is how much memory, in pages (64 GiB), has a page index that is far smaller than what the shim may take
	// without collecting garbage. Near that limit it would do nothing else.
	smallMemory = 64 << 30 / pageindex.PageSize
)

// newRestored makes everything ready for `runc restore` that must be there
// before it runs. It changes the bundle: the configuration names CRIU's options.
func newRestored(ctx context.Context, s *service, ns string, r *taskapi.CreateTaskRequest, spec *specs.Spec, opts *runcoptions.Options, prepared *api.PrepareResponse) (_ *restored, err error) {
	ctx, span := startSpan(ctx, "Ready")
	defer span.End()
	c := &restored{
		id: r.ID, namespace: ns,
		dir:      scratchDir(s.node.address, ns, r.ID),
		prepared: prepared,
		service:  s,
		started:  time.Now(),
		paged:    make(chan struct{}),
		spec:     spec,
		profiled: make(chan struct{}),
		looked:   verdict{known: make(chan struct{})},
		stderr:   cmp.Or(r.Stderr, r.Stdout),
	}
	if spec.Process != nil {
		c.oomScore = spec.Process.OOMScoreAdj
	}
	c.work, c.config = filepath.Join(c.dir, "work"), filepath.Join(c.dir, "criu.conf")
	c.criuRoot = criuRoot(opts, ns, r.ID)
	if name := spec.Annotations["io.kubernetes.cri.sandbox-name"]; name != "" {
		c.pod = spec.Annotations["io.kubernetes.cri.sandbox-namespace"] + "/" + name
	}
	c.breakpoints = headstart.PrepareBreakpoints()
	c.collect = func() {}
	if prepared.PagesTotal <= smallMemory {
		c.collect = s.collector.pause()
	}
	// What goes on after the request is no part of its trace.
	run, stop := context.WithCancel(log.WithLogger(context.Background(), log.G(ctx)))
	c.stop = stop
	defer func() {
		if err != nil {
			c.close(ctx)
		}
	}()
	if c.rootfs, err = rootfsOf(r.Bundle, spec); err != nil {
		return nil, err
	}
	if c.cgroupPath, err = cgroupPath(spec, opts.SystemdCgroup); err != nil {
		return nil, err
	}
	c.cgroups = cgroupDirs(c.cgroupPath)
	// There is something only if a shim was killed and nobody cleaned up yet.
	if err := removeScratch(c.dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.work, 0o700); err != nil {
		return nil, err
	}
	c.filled = pager.Policy(prepared.Policy) == pager.Complete
	runtime := cmp.Or(opts.BinaryName, runc.DefaultCommand)
	c.running.Go(func() { c.profile(runtime) })
	opts = proto.Clone(opts).(*runcoptions.Options)
	opts.CriuWorkPath = c.work
	if r.Options, err = typeurl.MarshalAnyToProto(opts); err != nil {
		return nil, err
	}
	var g errgroup.Group // the container waits: at the same time what can be
	g.Go(func() error { return c.layOut(ctx, r.Bundle, spec) })
	g.Go(func() error { return c.listen(run) })
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return c, nil
}

// layOut makes what CRIU reads: its images as this container gets them, and its
// options.
func (c *restored) layOut(ctx context.Context, bundle string, spec *specs.Spec) error {
	hostname, err := hostnameOf(spec)
	if err != nil {
		return err
	}
	plan, mounts := c.premount(ctx)
	view := filepath.Join(c.dir, "images")
	if err := makeView(view, c.prepared.ImagesDir, hostname, plan); err != nil {
		return err
	}
	c.prepared.ImagesDir = view
	options, err := criu.RestoreOptions{LazyPages: true, LogFile: criulog.Restore, Mounts: mounts, Verbosity: 4}.Encode()
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.config, options, 0o600); err != nil {
		return err
	}
	return annotate(bundle, c.config)
}

// listen makes the socket on which CRIU finds the fault handler. The handler itself comes
// later: it takes the longer the more memory there is, and nobody asks for it before
// CRIU has begun.
func (c *restored) listen(run context.Context) (err error) {
	who := keeper.Container{RestoreID: c.prepared.RestoreId, Cgroups: c.cgroups}
	if c.keeper, err = keeper.Dial(keeperAddress(c.service.node.address), who); err != nil {
		return err
	}
	if c.listener, err = lazypages.Listen(c.work); err != nil {
		return err
	}
	c.running.Go(func() { c.page(run) })
	return nil
}

// page makes the fault handler, and its guard before it is given any memory, and lets
// it serve.
func (c *restored) page(ctx context.Context) {
	defer close(c.paged)
	if c.guard, c.pagerErr = guard.Start(c.cgroups); c.pagerErr != nil {
		return
	}
	if c.pager, c.pagerErr = c.newPager(); c.pagerErr != nil {
		return
	}
	c.running.Go(func() { c.expect(ctx) })
	c.running.Go(func() { c.serve(ctx) })
	c.running.Go(func() { c.report(ctx) })
}

// rootfsOf returns where runc finds a container's root filesystem.
func rootfsOf(bundle string, spec *specs.Spec) (string, error) {
	switch {
	case spec.Root == nil || spec.Root.Path == "":
		return "", errors.New("the container's spec names no root filesystem")
	case filepath.IsAbs(spec.Root.Path):
		return spec.Root.Path, nil
	}
	return filepath.Join(bundle, spec.Root.Path), nil
}

// scratchDir is the folder of one restore: CRIU's images as this container gets
// them, CRIU's work directory and options. It is beside the images that restores
// share, so that links to them are possible.
func scratchDir(node, namespace, id string) string {
	// No name in containerd has a tilde.
	return filepath.Join(filepath.Dir(node), "container-"+namespace+"~"+id)
}

// mountsDir is where in it CRIU finds mounts that were made for it.
const mountsDir = "mounts"

// removeScratch removes the folder of a restore, with what is mounted in it.
func removeScratch(dir string) error {
	if err := premount.Remove(filepath.Join(dir, mountsDir)); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// premount makes the mounts that the daemon has planned, and returns the plan and
// their paths; none, if that cannot be: CRIU can make them all.
func (c *restored) premount(ctx context.Context) (*premount.Plan, map[string]string) {
	dir := filepath.Join(c.dir, mountsDir)
	if !criu.PlainPath(dir) {
		return nil, nil
	}
	plan, err := premount.Read(c.prepared.ImagesDir)
	if plan == nil && err == nil {
		return nil, nil
	}
	var mounts map[string]string
	if err == nil {
		mounts, err = premount.Make(dir, plan)
	}
	if err != nil {
		log.G(ctx).WithError(err).WithField("container", c.id).Warn("thaw: mounts are left to CRIU")
		if err := premount.Remove(dir); err != nil {
			log.G(ctx).WithError(err).Warn("thaw: remove mounts")
		}
		return nil, nil
	}
	return plan, mounts
}

// annotate names CRIU's configuration file in the bundle's configuration, of which
// all else stays as containerd wrote it, whether this version of thaw knows it or
// not. Whatever the pod or the image said there is replaced.
func annotate(bundle, config string) error {
	path := filepath.Join(bundle, specFile)
	in, err := readBounded(path, maxSpec)
	if err != nil {
		return err
	}
	var spec map[string]json.RawMessage
	if err := json.Unmarshal(in, &spec); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	annotations := make(map[string]string)
	if a := spec["annotations"]; a != nil {
		if err := json.Unmarshal(a, &annotations); err != nil {
			return fmt.Errorf("annotations in %s: %w", path, err)
		}
	}
	annotations[criuConfigAnnotation] = config
	if spec["annotations"], err = json.Marshal(annotations); err != nil {
		return err
	}
	out, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", out, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (c *restored) newPager() (*pager.Pager, error) {
	b, err := readBounded(c.prepared.PageIndex, pageindex.MaxEncodedSize)
	if err != nil {
		return nil, err
	}
	index, err := pageindex.Parse(b)
	if err != nil {
		return nil, err
	}
	stores := make([]pager.Store, len(c.prepared.Stores))
	for i, s := range c.prepared.Stores {
		stores[i] = pager.Store{Data: s.Data, Present: s.Present}
	}
	return pager.New(pager.Config{
		Index:   index,
		Stores:  stores,
		Fetcher: &fetcher{c.service.node, c.prepared.RestoreId},
		Holder:  c.keeper,
		Policy:  pager.Policy(c.prepared.Policy),
		OnFatal: c.fail,
	})
}
