package main

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"fanfare/kubernetes/services"

	"github.com/spf13/cobra"
	core "k8s.io/api/core/v1"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const clusterDomain = "cluster.local"

type servicesOptions struct{ kubeconfig, dns, volumes, balancer string }

// newServicesCommand is what pods that run need around them: names, load balancers, and folders for volumes.
func newServicesCommand() *cobra.Command {
	var given servicesOptions
	command := &cobra.Command{
		Use:          "services",
		SilenceUsage: true,
		Args:         cobra.NoArgs,
		RunE:         func(*cobra.Command, []string) error { return given.run(genericapiserver.SetupSignalContext()) },
	}
	flags := command.Flags()
	flags.StringVar(&given.kubeconfig, "kubeconfig", "", "how to reach the API")
	flags.StringVar(&given.dns, "dns", "", "where the DNS server listens")
	flags.StringVar(&given.volumes, "volumes", "", "folder in which local volumes get their folders")
	flags.StringVar(&given.balancer, "balancer", "", "folder of the load balancer")
	return command
}

func (given *servicesOptions) run(ctx context.Context) error {
	config, err := clientcmd.BuildConfigFromFlags("", given.kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, time.Minute)
	lookup := services.NewLookup(factory)
	balancer := services.NewBalancer(given.balancer, client, lookup)
	if err := given.makeVolumes(factory); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	failed := make(chan error, 2)
	go func() { failed <- services.ServeNames(ctx, given.dns, clusterDomain, lookup) }()
	go func() { failed <- balancer.Run(ctx) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return nil
	}
}

// makeVolumes makes the folder of each new volume; a pod waits for it.
func (given *servicesOptions) makeVolumes(factory informers.SharedInformerFactory) error {
	inform := func(object any) {
		volume := object.(*core.PersistentVolume)
		if volume.Spec.Local == nil || filepath.Dir(volume.Spec.Local.Path) != given.volumes {
			return
		}
		if err := os.MkdirAll(volume.Spec.Local.Path, 0o755); err != nil {
			fail(err)
		}
	}
	remove := func(object any) {
		if volume, is := object.(*core.PersistentVolume); is && volume.Spec.Local != nil && filepath.Dir(volume.Spec.Local.Path) == given.volumes {
			_ = os.RemoveAll(volume.Spec.Local.Path)
		}
	}
	_, err := factory.Core().V1().PersistentVolumes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: inform, DeleteFunc: remove})
	return err
}
