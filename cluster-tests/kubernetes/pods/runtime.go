// Package pods is a container runtime for the kubelet: pods have a network namespace and an address of their own, and their containers
// run as processes of the host, which end with the kubelet.
package pods

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis"
	api "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Options of a runtime.
type Options struct {
	// Folder is for the runtime alone.
	Folder string
	// Images is the folder of the programs that stand for images.
	Images string
	// Network is where pods get their addresses, Gateway is the address of the bridge.
	Network netip.Prefix
	Gateway netip.Addr
	Bridge  string
}

// Runtime implements the kubelet's view of a container runtime.
type Runtime struct {
	options Options
	network *network

	lock       sync.Mutex
	sandboxes  map[string]*sandbox
	containers map[string]*container
}

var _ cri.RuntimeService = (*Runtime)(nil)

type sandbox struct {
	id      string
	created time.Time
	config  *api.PodSandboxConfig
	// Nil: the pod is in the network of the host, or has been stopped.
	link      *link
	isStopped bool
}

// New makes a runtime without pods.
func New(options Options) (*Runtime, error) {
	if err := os.MkdirAll(options.Folder, 0o700); err != nil {
		return nil, err
	}
	return &Runtime{
		options:    options,
		network:    &network{options: options, next: options.Network.Addr()},
		sandboxes:  map[string]*sandbox{},
		containers: map[string]*container{},
	}, nil
}

func newID() string {
	var bytes [32]byte
	_, _ = rand.Read(bytes[:])
	return hex.EncodeToString(bytes[:])
}

func notFound(what, id string) error { return status.Errorf(codes.NotFound, "no %s %s", what, id) }

func (runtime *Runtime) RunPodSandbox(_ context.Context, config *api.PodSandboxConfig, handler string) (string, error) {
	if handler != "" {
		return "", status.Errorf(codes.InvalidArgument, "no runtime handler %q", handler)
	}
	pod := &sandbox{id: newID(), created: time.Now(), config: config}
	if !inHostNetwork(config) {
		link, err := runtime.network.connect(pod.id)
		if err != nil {
			return "", err
		}
		pod.link = link
	}
	if config.LogDirectory != "" {
		if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
			return "", err
		}
	}
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	runtime.sandboxes[pod.id] = pod
	return pod.id, nil
}

func inHostNetwork(config *api.PodSandboxConfig) bool {
	return config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == api.NamespaceMode_NODE
}

func (runtime *Runtime) StopPodSandbox(_ context.Context, id string) error {
	runtime.lock.Lock()
	pod := runtime.sandboxes[id]
	var link *link
	if pod != nil {
		pod.isStopped = true
		pod.link, link = nil, pod.link
	}
	runtime.lock.Unlock()
	for _, container := range runtime.containersOf(id) {
		container.stop(0)
	}
	if link != nil {
		link.close()
	}
	return nil
}

func (runtime *Runtime) RemovePodSandbox(ctx context.Context, id string) error {
	err := runtime.StopPodSandbox(ctx, id)
	for _, container := range runtime.containersOf(id) {
		err = errors.Join(err, runtime.RemoveContainer(ctx, container.id))
	}
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	delete(runtime.sandboxes, id)
	return err
}

func (runtime *Runtime) containersOf(pod string) []*container {
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	var found []*container
	for _, container := range runtime.containers {
		if container.pod.id == pod {
			found = append(found, container)
		}
	}
	return found
}

func (pod *sandbox) state() api.PodSandboxState {
	if pod.isStopped {
		return api.PodSandboxState_SANDBOX_NOTREADY
	}
	return api.PodSandboxState_SANDBOX_READY
}

func (runtime *Runtime) PodSandboxStatus(_ context.Context, id string, _ bool) (*api.PodSandboxStatusResponse, error) {
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	pod := runtime.sandboxes[id]
	if pod == nil {
		return nil, notFound("pod", id)
	}
	network := &api.PodSandboxNetworkStatus{}
	if pod.link != nil {
		network.Ip = pod.link.address.String()
	}
	return &api.PodSandboxStatusResponse{Status: &api.PodSandboxStatus{
		Id:          id,
		Metadata:    pod.config.Metadata,
		State:       pod.state(),
		CreatedAt:   pod.created.UnixNano(),
		Network:     network,
		Labels:      pod.config.Labels,
		Annotations: pod.config.Annotations,
		Linux: &api.LinuxPodSandboxStatus{
			Namespaces: &api.Namespace{Options: pod.config.GetLinux().GetSecurityContext().GetNamespaceOptions()},
		},
	}}, nil
}

func (runtime *Runtime) ListPodSandbox(_ context.Context, filter *api.PodSandboxFilter) ([]*api.PodSandbox, error) {
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	var found []*api.PodSandbox
	for _, pod := range runtime.sandboxes {
		isWanted := (filter.GetId() == "" || filter.Id == pod.id) &&
			(filter.GetState() == nil || filter.State.State == pod.state()) && hasLabels(pod.config.Labels, filter.GetLabelSelector())
		if !isWanted {
			continue
		}
		found = append(found, &api.PodSandbox{
			Id:          pod.id,
			Metadata:    pod.config.Metadata,
			State:       pod.state(),
			CreatedAt:   pod.created.UnixNano(),
			Labels:      pod.config.Labels,
			Annotations: pod.config.Annotations,
		})
	}
	return found, nil
}

func hasLabels(labels, wanted map[string]string) bool {
	for name, value := range maps.All(wanted) {
		if labels[name] != value {
			return false
		}
	}
	return true
}

func (runtime *Runtime) Version(context.Context, string) (*api.VersionResponse, error) {
	return &api.VersionResponse{Version: "0.1.0", RuntimeName: "processes", RuntimeVersion: "1.0.0", RuntimeApiVersion: "v1"}, nil
}

func (runtime *Runtime) Status(context.Context, bool) (*api.StatusResponse, error) {
	return &api.StatusResponse{Status: &api.RuntimeStatus{Conditions: []*api.RuntimeCondition{
		{Type: "RuntimeReady", Status: true},
		{Type: "NetworkReady", Status: true},
	}}}, nil
}

func (runtime *Runtime) RuntimeConfig(context.Context) (*api.RuntimeConfigResponse, error) {
	return &api.RuntimeConfigResponse{Linux: &api.LinuxRuntimeConfiguration{CgroupDriver: api.CgroupDriver_CGROUPFS}}, nil
}

func (runtime *Runtime) UpdateRuntimeConfig(context.Context, *api.RuntimeConfig) error { return nil }

func (runtime *Runtime) Close(context.Context) error { return nil }

func (runtime *Runtime) folder(container string) string {
	return filepath.Join(runtime.options.Folder, container)
}
