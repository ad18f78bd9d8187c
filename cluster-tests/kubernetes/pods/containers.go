package pods

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	process "fanfare/kubernetes/container"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/exec"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// What a root user of a container has when the pod says nothing, as with containerd.
var defaultCapabilities = []string{"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP",
	"SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"}

type container struct {
	id      string
	pod     *sandbox
	config  *api.ContainerConfig
	image   *image
	created time.Time
	spec    *process.Spec
	log     *logFile

	lock              sync.Mutex
	process           *process.Process
	started, finished time.Time
	failure           error
}

func (runtime *Runtime) CreateContainer(_ context.Context, pod string, config *api.ContainerConfig, podConfig *api.PodSandboxConfig) (string, error) {
	runtime.lock.Lock()
	sandbox := runtime.sandboxes[pod]
	runtime.lock.Unlock()
	if sandbox == nil || sandbox.isStopped {
		return "", notFound("pod", pod)
	}
	image, err := Images{runtime.options.Images}.find(config.Image.Image)
	if config.Image.UserSpecifiedImage != "" && err != nil {
		// The kubelet names the image by its identity.
		image, err = Images{runtime.options.Images}.find(config.Image.UserSpecifiedImage)
	}
	if err != nil {
		return "", err
	}
	made := &container{id: newID(), pod: sandbox, config: config, image: image, created: time.Now()}
	folder := runtime.folder(made.id)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", err
	}
	if made.spec, err = specOf(folder, config, podConfig, image); err != nil {
		return "", err
	}
	if podConfig.LogDirectory != "" && config.LogPath != "" {
		if made.log, err = openLog(filepath.Join(podConfig.LogDirectory, config.LogPath)); err != nil {
			return "", err
		}
	}
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	runtime.containers[made.id] = made
	return made.id, nil
}

func specOf(root string, config *api.ContainerConfig, pod *api.PodSandboxConfig, image *image) (*process.Spec, error) {
	security := config.GetLinux().GetSecurityContext()
	namespaces := security.GetNamespaceOptions()
	if security.GetPrivileged() || namespaces.GetPid() != api.NamespaceMode_CONTAINER || namespaces.GetIpc() == api.NamespaceMode_NODE {
		return nil, status.Error(codes.Unimplemented, "privileged containers and shared process or IPC namespaces are not there")
	}
	spec := &process.Spec{
		Args:             append(slices.Clone(config.Command), config.Args...),
		Env:              []string{defaultPath, "HOSTNAME=" + pod.Hostname},
		WorkingDirectory: "/",
		HostName:         pod.Hostname,
		Root:             root,
		RootReadOnly:     security.GetReadonlyRootfs(),
		MaskedPaths:      security.GetMaskedPaths(),
		ReadOnlyPaths:    security.GetReadonlyPaths(),
		User:             imageUser,
		Group:            imageUser,
		Capabilities:     capabilities(security.GetCapabilities()),
		NoNewPrivileges:  security.GetNoNewPrivs(),
		Mounts:           []process.Mount{{Source: image.program, Target: image.entry, ReadOnly: true}},
		Files: map[string]string{
			"/etc/resolv.conf":   resolver(pod.GetDnsConfig()),
			"/etc/hostname":      pod.Hostname + "\n",
			"/etc/nsswitch.conf": "hosts: files dns\n",
			"/etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n" +
				"nonroot:x:65532:65532:nonroot:/:/sbin/nologin\n",
			"/etc/group": "root:x:0:\nnobody:x:65534:\nnonroot:x:65532:\n",
		},
	}
	if len(config.Command) == 0 {
		spec.Args = append([]string{image.entry}, config.Args...)
	}
	if config.WorkingDir != "" {
		spec.WorkingDirectory = config.WorkingDir
	}
	for _, variable := range config.Envs {
		// The pod's word counts.
		spec.Env = slices.DeleteFunc(spec.Env, func(known string) bool { return strings.HasPrefix(known, variable.Key+"=") })
		spec.Env = append(spec.Env, variable.Key+"="+string(variable.Value))
	}
	if user := security.GetRunAsUser(); user != nil {
		// Of a user that the image does not know, the group is 0.
		if spec.User = int(user.Value); spec.User != imageUser {
			spec.Group = 0
		}
	}
	if group := security.GetRunAsGroup(); group != nil {
		spec.Group = int(group.Value)
	}
	spec.Groups = []int{spec.Group}
	for _, group := range security.GetSupplementalGroups() {
		spec.Groups = append(spec.Groups, int(group))
	}
	for _, mount := range config.Mounts {
		spec.Mounts = append(spec.Mounts, process.Mount{Source: mount.HostPath, Target: mount.ContainerPath, ReadOnly: mount.Readonly})
	}
	return spec, nil
}

func resolver(config *api.DNSConfig) string {
	var text strings.Builder
	for _, server := range config.GetServers() {
		fmt.Fprintln(&text, "nameserver", server)
	}
	if len(config.GetSearches()) > 0 {
		fmt.Fprintln(&text, "search", strings.Join(config.Searches, " "))
	}
	if len(config.GetOptions()) > 0 {
		fmt.Fprintln(&text, "options", strings.Join(config.Options, " "))
	}
	return text.String()
}

func capabilities(change *api.Capability) []string {
	kept := slices.Clone(defaultCapabilities)
	for _, name := range change.GetDropCapabilities() {
		kept = slices.DeleteFunc(kept, func(known string) bool { return name == "ALL" || known == strings.TrimPrefix(name, "CAP_") })
	}
	return append(kept, change.GetAddCapabilities()...)
}

func (runtime *Runtime) container(id string) (*container, error) {
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	if found := runtime.containers[id]; found != nil {
		return found, nil
	}
	return nil, notFound("container", id)
}

func (runtime *Runtime) StartContainer(_ context.Context, id string) error {
	made, err := runtime.container(id)
	if err != nil {
		return err
	}
	runtime.lock.Lock()
	var network *os.File
	if made.pod.link != nil {
		network = made.pod.link.namespace
	}
	isStopped := made.pod.isStopped
	runtime.lock.Unlock()
	if isStopped {
		return notFound("pod", made.pod.id)
	}
	return made.start(network)
}

func (made *container) start(network *os.File) error {
	made.lock.Lock()
	defer made.lock.Unlock()
	made.started = time.Now()
	stdout, stderr := made.log.stream("stdout"), made.log.stream("stderr")
	running, err := process.Start(made.spec, network, stdout, stderr)
	stdout.Close()
	stderr.Close()
	if err != nil {
		made.failure, made.finished = err, time.Now()
		return err
	}
	made.process = running
	go func() {
		<-running.Done()
		made.lock.Lock()
		defer made.lock.Unlock()
		made.finished = time.Now()
	}()
	return nil
}

func (runtime *Runtime) StopContainer(_ context.Context, id string, timeoutS int64) error {
	made, err := runtime.container(id)
	if err != nil {
		return nil
	}
	made.stop(time.Duration(timeoutS) * time.Second)
	return nil
}

// stop returns when the container has ended.
func (made *container) stop(grace time.Duration) {
	made.lock.Lock()
	running := made.process
	made.lock.Unlock()
	if running == nil {
		return
	}
	if grace > 0 {
		running.Signal(made.stopSignal())
		select {
		case <-running.Done():
			return
		case <-time.After(grace):
		}
	}
	running.Signal(syscall.SIGKILL)
	<-running.Done()
}

func (made *container) stopSignal() syscall.Signal {
	if made.config.StopSignal == api.Signal_SIGINT {
		return syscall.SIGINT
	}
	return syscall.SIGTERM
}

func (runtime *Runtime) RemoveContainer(_ context.Context, id string) error {
	made, err := runtime.container(id)
	if err != nil {
		return nil
	}
	made.stop(0)
	runtime.lock.Lock()
	delete(runtime.containers, id)
	runtime.lock.Unlock()
	return os.RemoveAll(runtime.folder(id))
}

// state is to be called with the lock held.
func (made *container) state() api.ContainerState {
	switch {
	case !made.finished.IsZero():
		return api.ContainerState_CONTAINER_EXITED
	case made.process != nil:
		return api.ContainerState_CONTAINER_RUNNING
	default:
		return api.ContainerState_CONTAINER_CREATED
	}
}

func (runtime *Runtime) ListContainers(_ context.Context, filter *api.ContainerFilter) ([]*api.Container, error) {
	runtime.lock.Lock()
	defer runtime.lock.Unlock()
	var found []*api.Container
	for _, made := range runtime.containers {
		made.lock.Lock()
		state := made.state()
		made.lock.Unlock()
		isWanted := (filter.GetId() == "" || filter.Id == made.id) && (filter.GetPodSandboxId() == "" || filter.PodSandboxId == made.pod.id) &&
			(filter.GetState() == nil || filter.State.State == state) && hasLabels(made.config.Labels, filter.GetLabelSelector())
		if !isWanted {
			continue
		}
		found = append(found, &api.Container{
			Id:           made.id,
			PodSandboxId: made.pod.id,
			Metadata:     made.config.Metadata,
			Image:        made.config.Image,
			ImageRef:     made.image.id,
			ImageId:      made.image.id,
			State:        state,
			CreatedAt:    made.created.UnixNano(),
			Labels:       made.config.Labels,
			Annotations:  made.config.Annotations,
		})
	}
	return found, nil
}

func (runtime *Runtime) ContainerStatus(_ context.Context, id string, _ bool) (*api.ContainerStatusResponse, error) {
	made, err := runtime.container(id)
	if err != nil {
		return nil, err
	}
	made.lock.Lock()
	defer made.lock.Unlock()
	described := &api.ContainerStatus{
		Id:          id,
		Metadata:    made.config.Metadata,
		State:       made.state(),
		CreatedAt:   made.created.UnixNano(),
		StartedAt:   nanoseconds(made.started),
		FinishedAt:  nanoseconds(made.finished),
		Image:       made.config.Image,
		ImageRef:    made.image.id,
		ImageId:     made.image.id,
		Labels:      made.config.Labels,
		Annotations: made.config.Annotations,
		Mounts:      made.config.Mounts,
		LogPath:     made.log.path(),
	}
	switch {
	case made.failure != nil:
		described.ExitCode, described.Reason, described.Message = 128, "StartError", made.failure.Error()
	case made.finished.IsZero():
	case made.process.ExitCode() == 0:
		described.Reason = "Completed"
	default:
		described.ExitCode, described.Reason = int32(made.process.ExitCode()), "Error"
	}
	return &api.ContainerStatusResponse{Status: described}, nil
}

func nanoseconds(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixNano()
}

func (runtime *Runtime) ExecSync(ctx context.Context, id string, args []string, timeout time.Duration) ([]byte, []byte, error) {
	made, err := runtime.container(id)
	if err != nil {
		return nil, nil, err
	}
	made.lock.Lock()
	running, state := made.process, made.state()
	made.lock.Unlock()
	if state != api.ContainerState_CONTAINER_RUNNING {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "container %s does not run", id)
	}
	if timeout > 0 {
		limited, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		ctx = limited
	}
	stdout, stderr, code, err := running.Run(made.spec, args, ctx.Done())
	switch {
	case ctx.Err() != nil:
		return stdout, stderr, status.Errorf(codes.DeadlineExceeded, "%q takes longer than %s", args, timeout)
	case err == nil && code != 0:
		err = exec.CodeExitError{Err: fmt.Errorf("%q exited with %d: %s", args, code, stderr), Code: code}
	}
	return stdout, stderr, err
}

func (runtime *Runtime) ReopenContainerLog(_ context.Context, id string) error {
	made, err := runtime.container(id)
	if err != nil {
		return err
	}
	return made.log.reopen()
}
