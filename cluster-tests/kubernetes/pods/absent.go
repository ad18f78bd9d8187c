package pods

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// What this runtime does not do.

var errAbsent = status.Error(codes.Unimplemented, "this runtime runs pods as processes of the host and does no more than that")

func (runtime *Runtime) Exec(context.Context, *api.ExecRequest) (*api.ExecResponse, error) {
	return nil, errAbsent
}

func (runtime *Runtime) Attach(context.Context, *api.AttachRequest) (*api.AttachResponse, error) {
	return nil, errAbsent
}

func (runtime *Runtime) PortForward(context.Context, *api.PortForwardRequest) (*api.PortForwardResponse, error) {
	return nil, errAbsent
}

func (runtime *Runtime) CheckpointContainer(context.Context, *api.CheckpointContainerRequest) error {
	return errAbsent
}

func (runtime *Runtime) GetContainerEvents(context.Context, chan *api.ContainerEventResponse, func(api.RuntimeService_GetContainerEventsClient)) error {
	return errAbsent
}

// Limits of resources are for the scheduler alone.

func (runtime *Runtime) UpdateContainerResources(context.Context, string, *api.ContainerResources) error {
	return nil
}

func (runtime *Runtime) UpdatePodSandboxResources(context.Context, *api.UpdatePodSandboxResourcesRequest) (*api.UpdatePodSandboxResourcesResponse, error) {
	return &api.UpdatePodSandboxResourcesResponse{}, nil
}

func (runtime *Runtime) ContainerStats(_ context.Context, id string) (*api.ContainerStats, error) {
	return nil, errAbsent
}

func (runtime *Runtime) ListContainerStats(context.Context, *api.ContainerStatsFilter) ([]*api.ContainerStats, error) {
	return nil, nil
}

func (runtime *Runtime) PodSandboxStats(context.Context, string) (*api.PodSandboxStats, error) {
	return nil, errAbsent
}

func (runtime *Runtime) ListPodSandboxStats(context.Context, *api.PodSandboxStatsFilter) ([]*api.PodSandboxStats, error) {
	return nil, nil
}

func (runtime *Runtime) ListMetricDescriptors(context.Context) ([]*api.MetricDescriptor, error) {
	return nil, nil
}

func (runtime *Runtime) ListPodSandboxMetrics(context.Context) ([]*api.PodSandboxMetrics, error) {
	return nil, nil
}
