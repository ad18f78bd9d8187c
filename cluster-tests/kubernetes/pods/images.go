package pods

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis"
	api "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The user of an image when a pod names none: "nonroot" of distroless images.
const imageUser = 65532

// Images stand in a folder, each as a program or a link to one. The image registry/path/name:tag is the file name:tag, or else name.
type Images struct {
	Folder string
}

var _ cri.ImageManagerService = Images{}

type image struct {
	id string
	// Of the host, without links.
	program string
	// The program's path in the container.
	entry string
	size  uint64
}

func (images Images) find(reference string) (*image, error) {
	reference, _, _ = strings.Cut(reference, "@")
	file := path.Base(reference)
	name, _, _ := strings.Cut(file, ":")
	for _, candidate := range []string{file, name} {
		program, err := filepath.EvalSymlinks(filepath.Join(images.Folder, candidate))
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		information, err := os.Stat(program)
		if err != nil {
			return nil, err
		}
		identity := fmt.Sprint(program, information.Size(), information.ModTime())
		return &image{
			id:      fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(identity))),
			program: program,
			entry:   "/usr/local/bin/" + name,
			size:    uint64(information.Size()),
		}, nil
	}
	return nil, status.Errorf(codes.NotFound, "no file %s in the folder of images", file)
}

func (found *image) describe(reference string) *api.Image {
	return &api.Image{
		Id:       found.id,
		RepoTags: []string{reference},
		Size:     found.size,
		Uid:      &api.Int64Value{Value: imageUser},
		Spec:     &api.ImageSpec{Image: reference},
	}
}

func (images Images) ImageStatus(_ context.Context, spec *api.ImageSpec, _ bool) (*api.ImageStatusResponse, error) {
	found, err := images.find(spec.Image)
	switch {
	case status.Code(err) == codes.NotFound:
		return &api.ImageStatusResponse{}, nil
	case err != nil:
		return nil, err
	}
	return &api.ImageStatusResponse{Image: found.describe(spec.Image)}, nil
}

func (images Images) PullImage(_ context.Context, spec *api.ImageSpec, _ *api.AuthConfig, _ *api.PodSandboxConfig) (string, error) {
	found, err := images.find(spec.Image)
	if err != nil {
		return "", err
	}
	return found.id, nil
}

func (images Images) ListImages(context.Context, *api.ImageFilter) ([]*api.Image, error) {
	// The kubelet lists images in order to delete those without a use.
	return nil, nil
}

func (images Images) RemoveImage(context.Context, *api.ImageSpec) error { return nil }

func (images Images) ImageFsInfo(context.Context) (*api.ImageFsInfoResponse, error) {
	use := &api.FilesystemUsage{
		Timestamp:  time.Now().UnixNano(),
		FsId:       &api.FilesystemIdentifier{Mountpoint: images.Folder},
		UsedBytes:  &api.UInt64Value{Value: 1},
		InodesUsed: &api.UInt64Value{Value: 1},
	}
	usage := []*api.FilesystemUsage{use}
	return &api.ImageFsInfoResponse{ImageFilesystems: usage, ContainerFilesystems: usage}, nil
}

func (images Images) Close(context.Context) error { return nil }
