// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"time"

	"github.com/containerd/log"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/restore"
)

// service serves api.Node. Errors get their RPC status here and nowhere below.
type service struct {
	restores *restore.Manager
	metrics  *metrics
}

var _ api.NodeService = (*service)(nil)

func (s *service) Prepare(ctx context.Context, req *api.PrepareRequest) (*api.PrepareResponse, error) {
	begin := time.Now()
	resp, err := s.restores.Prepare(ctx, req)
	s.metrics.prepared(resp, err)
	lg := log.G(ctx).WithField("namespace", req.GetNamespace()).WithField("container", req.GetContainerId())
	if err != nil {
		lg.WithError(err).Error("restore refused")
		return nil, api.ToStatus(err)
	}
	if resp.GetRestore() {
		lg.WithField("image", resp.GetImage()).WithField("took", time.Since(begin)).Info("restore prepared")
	}
	return resp, nil
}

func (s *service) Admit(ctx context.Context, req *api.AdmitRequest) (*api.AdmitResponse, error) {
	begin := time.Now()
	err := s.restores.Admit(ctx, req.GetRestoreId(), req.GetRootfs(), req.GetSeccompFilter())
	lg := log.G(ctx).WithField("restore", req.GetRestoreId()).WithField("took", time.Since(begin))
	if err != nil {
		lg.WithError(err).Error("restore refused")
		return nil, api.ToStatus(err)
	}
	lg.Info("restore admitted")
	return &api.AdmitResponse{}, nil
}

func (s *service) Fetch(ctx context.Context, req *api.FetchRequest) (*api.FetchResponse, error) {
	if err := s.restores.Fetch(ctx, req); err != nil {
		return nil, api.ToStatus(err)
	}
	return &api.FetchResponse{}, nil
}

func (s *service) Expected(ctx context.Context, req *api.ExpectedRequest) (*api.ExpectedResponse, error) {
	set, err := s.restores.Expected(ctx, req.GetRestoreId())
	if err != nil {
		return nil, api.ToStatus(err)
	}
	return &api.ExpectedResponse{WorkingSet: set}, nil
}

func (s *service) Report(ctx context.Context, req *api.ReportRequest) (*api.ReportResponse, error) {
	before, err := s.restores.Report(ctx, req.GetStatus())
	if err != nil {
		return nil, api.ToStatus(err)
	}
	s.metrics.reported(before, req.GetStatus())
	return &api.ReportResponse{}, nil
}

func (s *service) Record(ctx context.Context, req *api.RecordRequest) (*api.RecordResponse, error) {
	if err := s.restores.Record(ctx, req.GetRestoreId(), req.GetWorkingSet()); err != nil {
		return nil, api.ToStatus(err)
	}
	return &api.RecordResponse{}, nil
}

func (s *service) WorkingSet(ctx context.Context, req *api.WorkingSetRequest) (*api.WorkingSetResponse, error) {
	set, err := s.restores.WorkingSet(ctx, req.GetDigest())
	if err != nil {
		return nil, api.ToStatus(err)
	}
	return &api.WorkingSetResponse{WorkingSet: set}, nil
}

func (s *service) Release(ctx context.Context, req *api.ReleaseRequest) (*api.ReleaseResponse, error) {
	if err := s.restores.Release(ctx, req.GetRestoreId()); err != nil {
		return nil, api.ToStatus(err)
	}
	return &api.ReleaseResponse{}, nil
}

func (s *service) List(context.Context, *api.ListRequest) (*api.ListResponse, error) {
	return &api.ListResponse{Restores: s.restores.List()}, nil
}
