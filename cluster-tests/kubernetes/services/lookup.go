// Package services answers for the Services of a cluster: names in DNS, and load balancers.
package services

import (
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	listers "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// Lookup knows the Services and their endpoints.
type Lookup struct {
	services corelisters.ServiceLister
	slices   listers.EndpointSliceLister
	changed  chan struct{}
	// Without one, the name of a service stands for its endpoints.
	hasBalancer bool
}

// NewLookup follows the objects once the factory is started.
func NewLookup(factory informers.SharedInformerFactory) *Lookup {
	lookup := &Lookup{
		services: factory.Core().V1().Services().Lister(),
		slices:   factory.Discovery().V1().EndpointSlices().Lister(),
		changed:  make(chan struct{}, 1),

		hasBalancer: canBalance(),
	}
	note := func() {
		select {
		case lookup.changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { note() },
		UpdateFunc: func(any, any) { note() },
		DeleteFunc: func(any) { note() },
	}
	for _, informer := range []cache.SharedIndexInformer{
		factory.Core().V1().Services().Informer(),
		factory.Discovery().V1().EndpointSlices().Informer(),
	} {
		// Fails only for an informer that has stopped.
		_, _ = informer.AddEventHandler(handler)
	}
	return lookup
}

type endpoint struct {
	hostName string
	address  netip.Addr
	isReady  bool
	// By the name of the service's port.
	ports map[string]uint16
}

// endpoints are those of all slices of a service, each address once.
func (lookup *Lookup) endpoints(namespace, service string) []endpoint {
	selector := labels.SelectorFromSet(labels.Set{discovery.LabelServiceName: service})
	// A lister of a cache does not fail.
	all, _ := lookup.slices.EndpointSlices(namespace).List(selector)
	var found []endpoint
	for _, slice := range all {
		ports := map[string]uint16{}
		for _, port := range slice.Ports {
			if port.Port != nil {
				name := ""
				if port.Name != nil {
					name = *port.Name
				}
				ports[name] = uint16(*port.Port)
			}
		}
		for _, one := range slice.Endpoints {
			address, err := netip.ParseAddr(one.Addresses[0])
			isKnown := slices.ContainsFunc(found, func(known endpoint) bool { return known.address == address })
			if err != nil || isKnown {
				continue
			}
			next := endpoint{address: address, isReady: one.Conditions.Ready == nil || *one.Conditions.Ready, ports: ports}
			if one.Hostname != nil {
				next.hostName = *one.Hostname
			}
			found = append(found, next)
		}
	}
	slices.SortFunc(found, func(a, b endpoint) int { return a.address.Compare(b.address) })
	return found
}

// resolve gives the addresses of a name under svc.<domain>: service.namespace, or pod.service.namespace. The controller counts endpoints
// as ready where the service publishes those that are not.
func (lookup *Lookup) resolve(name string) (addresses []netip.Addr, exists bool) {
	parts := strings.Split(name, ".")
	host := ""
	if len(parts) == 3 {
		host, parts = parts[0], parts[1:]
	}
	if len(parts) != 2 {
		return nil, false
	}
	service, err := lookup.services.Services(parts[1]).Get(parts[0])
	if err != nil {
		return nil, false
	}
	isHeadless := service.Spec.ClusterIP == core.ClusterIPNone
	if address, err := netip.ParseAddr(service.Spec.ClusterIP); err == nil && host == "" && lookup.hasBalancer {
		return []netip.Addr{address}, true
	}
	for _, one := range lookup.endpoints(parts[1], parts[0]) {
		if one.isReady && (host == "" || host == one.hostName) {
			addresses = append(addresses, one.address)
		}
	}
	return addresses, len(addresses) > 0 || host == "" && !isHeadless
}

// withAddress are the services that are not headless, in the order in which they were made.
func (lookup *Lookup) withAddress() []*core.Service {
	all, _ := lookup.services.List(labels.Everything())
	found := slices.DeleteFunc(slices.Clone(all), func(service *core.Service) bool {
		_, err := netip.ParseAddr(service.Spec.ClusterIP)
		return err != nil
	})
	slices.SortFunc(found, func(a, b *core.Service) int {
		if order := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); order != 0 {
			return order
		}
		return strings.Compare(string(a.UID), string(b.UID))
	})
	return found
}
