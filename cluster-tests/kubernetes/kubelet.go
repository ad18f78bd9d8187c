package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"fanfare/kubernetes/pods"

	cadvisor "github.com/google/cadvisor/info/v1"
	cadvisorv2 "github.com/google/cadvisor/info/v2"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubernetes/cmd/kubelet/app"
	"k8s.io/kubernetes/cmd/kubelet/app/options"
	"k8s.io/kubernetes/pkg/kubelet"
	cadvisortest "k8s.io/kubernetes/pkg/kubelet/cadvisor/testing"
	"k8s.io/kubernetes/pkg/kubelet/cm"
	kubecontainer "k8s.io/kubernetes/pkg/kubelet/container"
	"k8s.io/kubernetes/pkg/kubelet/util"
	"k8s.io/kubernetes/pkg/util/oom"
)

const kubeletPort = 10250

type nodeOptions struct {
	name, kubeconfig, folder, images, bridge string
	address, gateway, network                string
	labels                                   map[string]string
}

// newKubeletCommand is the real kubelet, with a runtime that runs containers as processes of the host, and without cgroups.
func newKubeletCommand() *cobra.Command {
	var node nodeOptions
	command := &cobra.Command{
		Use:          "kubelet",
		SilenceUsage: true,
		Args:         cobra.NoArgs,
		RunE:         func(*cobra.Command, []string) error { return node.run() },
	}
	flags := command.Flags()
	flags.StringVar(&node.name, "node", "", "name of the node")
	flags.StringVar(&node.kubeconfig, "kubeconfig", "", "how to reach the API")
	flags.StringVar(&node.folder, "folder", "", "what the kubelet and its pods write")
	flags.StringVar(&node.images, "images", "", "folder of the programs that stand for images: name:tag, or name for all tags")
	flags.StringVar(&node.bridge, "bridge", "", "device that pods are connected to")
	flags.StringVar(&node.address, "address", "", "address of the node, which the host has")
	flags.StringVar(&node.gateway, "gateway", "", "address of the bridge, where the DNS server is as well")
	flags.StringVar(&node.network, "network", "", "the addresses of the node's pods")
	flags.StringToStringVar(&node.labels, "labels", nil, "labels of the node")
	return command
}

func (node *nodeOptions) run() error {
	network, err := netip.ParsePrefix(node.network)
	if err != nil {
		return err
	}
	gateway, err := netip.ParseAddr(node.gateway)
	if err != nil {
		return err
	}
	runtime, err := pods.New(pods.Options{
		Folder:  filepath.Join(node.folder, "containers"),
		Images:  node.images,
		Network: network,
		Gateway: gateway,
		Bridge:  node.bridge,
	})
	if err != nil {
		return err
	}
	settings, err := node.settings()
	if err != nil {
		return err
	}
	ctx := genericapiserver.SetupSignalContext()
	parts, err := app.UnsecuredDependencies(ctx, settings, feature.DefaultFeatureGate)
	if err != nil {
		return err
	}
	if err := node.connect(parts); err != nil {
		return err
	}
	parts.RemoteRuntimeService = runtime
	parts.RemoteImageService = pods.Images{Folder: node.images}
	parts.CAdvisorInterface = &machine{}
	parts.ContainerManager = cm.NewStubContainerManager()
	parts.OOMAdjuster = oom.NewFakeOOMAdjuster()
	parts.OSInterface = system{}
	parts.PodStartupLatencyTracker = util.NewPodStartupLatencyTracker()
	parts.NodeStartupLatencyTracker = util.NewNodeStartupLatencyTracker()
	kubelet.ContainerLogsDir = filepath.Join(node.folder, "log-links")
	hideKernelLog()
	if err := app.RunKubelet(ctx, settings, parts); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (node *nodeOptions) settings() (*options.KubeletServer, error) {
	flags := options.NewKubeletFlags()
	flags.RootDirectory = node.folder
	flags.CertDirectory = filepath.Join(node.folder, "pki")
	flags.HostnameOverride = node.name
	flags.NodeIP = node.address
	flags.NodeLabels = node.labels
	config, err := options.NewKubeletConfiguration()
	if err != nil {
		return nil, err
	}
	config.Address = node.address
	config.Port = kubeletPort
	config.ReadOnlyPort = 0
	config.ClusterDNS = []string{node.gateway}
	config.ClusterDomain = clusterDomain
	config.ResolverConfig = ""
	config.PodLogsDir = filepath.Join(node.folder, "logs")
	config.VolumePluginDir = filepath.Join(node.folder, "plugins")
	// How soon a changed Secret is in the files of a pod.
	config.SyncFrequency.Duration = time.Second
	config.NodeStatusUpdateFrequency.Duration = 5 * time.Second
	config.EnableControllerAttachDetach = false
	config.MakeIPTablesUtilChains = false
	config.LocalStorageCapacityIsolation = false
	config.FailSwapOn = false
	config.FailCgroupV1 = false
	config.CgroupsPerQOS = false
	config.EnforceNodeAllocatable = nil
	// The disk of the host is not the node's to keep free.
	config.EvictionHard = map[string]string{}
	// It would also be the limit of the pods.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, err
	}
	config.MaxOpenFiles = int64(limit.Max)
	return &options.KubeletServer{KubeletFlags: *flags, KubeletConfiguration: *config}, nil
}

func (node *nodeOptions) connect(parts *kubelet.Dependencies) error {
	config, err := clientcmd.BuildConfigFromFlags("", node.kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	config.Timeout = 10 * time.Second
	heartbeats, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	parts.KubeClient, parts.HeartbeatClient, parts.EventClient = client, heartbeats, client.CoreV1()
	return nil
}

// hideKernelLog keeps the kubelet from reading out-of-memory kills of the whole host. It runs in a mount namespace of its own.
func hideKernelLog() {
	if err := unix.Mount("/dev/null", "/dev/kmsg", "", unix.MS_BIND, ""); err != nil && !os.IsNotExist(err) {
		fmt.Fprintln(os.Stderr, "the kernel log stays visible:", err)
	}
}

// A machine as large as the simulated nodes are.
type machine struct{ cadvisortest.Fake }

func (machine) MachineInfo() (*cadvisor.MachineInfo, error) {
	memory := resource.MustParse("64Gi")
	return &cadvisor.MachineInfo{NumCores: 16, MemoryCapacity: uint64(memory.Value())}, nil
}

func (machine) VersionInfo() (*cadvisor.VersionInfo, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, err
	}
	return &cadvisor.VersionInfo{KernelVersion: unix.ByteSliceToString(name.Release[:]), ContainerOsVersion: "Linux"}, nil
}

func (machine) GetDirFsInfo(string) (cadvisorv2.FsInfo, error) {
	free := uint64(1) << 39
	return cadvisorv2.FsInfo{Capacity: 1 << 40, Available: free, Inodes: &free, InodesFree: &free}, nil
}

// The host, but for links to logs in a folder that all kubelets of a host share.
type system struct{ kubecontainer.RealOS }

func (system) Symlink(string, string) error { return nil }
