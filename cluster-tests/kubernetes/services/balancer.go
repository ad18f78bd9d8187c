package services

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"fanfare/kubernetes/container"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// The most endpoints of a port of a service.
	serversMax = 64
	// ProxyProtocol is the annotation of a service whose endpoints are told the client's address: v1 or v2.
	ProxyProtocol = "fanfare.test/proxy-protocol"
	again         = time.Second
)

// The first address of a load balancer; the next has the next.
var firstAddress = netip.MustParseAddr("192.0.2.10")

// Balancer lets HAProxy forward TCP to the ready endpoints of services: from the address of each load balancer, where a connection goes
// to the endpoint with the fewest, and from each cluster address, by turns. All these are addresses of the loopback device. Connections
// stay when their endpoint is not ready any more.
type Balancer struct {
	folder string
	client kubernetes.Interface
	lookup *Lookup
	// Of load balancers, by the identity of the service.
	addresses map[string]netip.Addr
	owned     map[string]bool
	process   *exec.Cmd
	running   string
	// By backend; an empty address is a free server.
	servers map[string][]netip.AddrPort
}

// NewBalancer uses a folder for files of its own.
func NewBalancer(folder string, client kubernetes.Interface, lookup *Lookup) *Balancer {
	return &Balancer{folder: folder, client: client, lookup: lookup, addresses: map[string]netip.Addr{}, owned: map[string]bool{}}
}

// Run follows the services until the end of the context. Failures are printed and what failed is tried again.
func (balancer *Balancer) Run(ctx context.Context) error {
	if !canBalance() {
		fmt.Fprintln(os.Stderr, "no haproxy: load balancers stay without an address")
		<-ctx.Done()
		return nil
	}
	if err := os.MkdirAll(balancer.folder, 0o700); err != nil {
		return err
	}
	for {
		if err := balancer.follow(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "load balancer:", err)
		}
		select {
		case <-balancer.lookup.changed:
		case <-time.After(again):
		case <-ctx.Done():
			return nil
		}
	}
}

func (balancer *Balancer) follow(ctx context.Context) error {
	var fronts []front
	for _, service := range balancer.lookup.withAddress() {
		addresses := map[string]string{"cluster": service.Spec.ClusterIP}
		if err := balancer.own(service.Spec.ClusterIP); err != nil {
			return err
		}
		if service.Spec.Type == core.ServiceTypeLoadBalancer {
			if err := balancer.address(ctx, service); err != nil {
				return err
			}
			addresses["outside"] = balancer.addresses[string(service.UID)].String()
		}
		for _, port := range service.Spec.Ports {
			for side, address := range addresses {
				if port.Protocol == core.ProtocolTCP {
					fronts = append(fronts, front{service, port, side, address})
				}
			}
		}
	}
	slices.SortFunc(fronts, func(a, b front) int { return strings.Compare(a.name(), b.name()) })
	if err := balancer.configure(fronts); err != nil {
		return err
	}
	for _, front := range fronts {
		endpoints := balancer.lookup.endpoints(front.service.Namespace, front.service.Name)
		if err := balancer.fill(front.name(), front.port.Name, endpoints); err != nil {
			return err
		}
	}
	return nil
}

// A front is where one port of a service is reached, from within the cluster or from outside.
type front struct {
	service       *core.Service
	port          core.ServicePort
	side, address string
}

func (front front) name() string {
	return fmt.Sprintf("%s_%s_%d_%s", front.service.Namespace, front.service.Name, front.port.Port, front.side)
}

func (front front) section() string {
	balance, proxy := "roundrobin", ""
	if front.side == "outside" {
		balance, proxy = "leastconn", map[string]string{"v1": "send-proxy", "v2": "send-proxy-v2"}[front.service.Annotations[ProxyProtocol]]
	}
	return fmt.Sprintf("listen %s\n  bind %s:%d\n  balance %s\n  server-template s 1-%d 192.0.2.1:1 disabled %s\n",
		front.name(), front.address, front.port.Port, balance, serversMax, proxy)
}

// own makes an address one of the loopback device.
func (balancer *Balancer) own(address string) error {
	if balancer.owned[address] {
		return nil
	}
	if output, err := exec.Command("ip", "address", "replace", address+"/32", "dev", "lo").CombinedOutput(); err != nil {
		return errors.Join(err, errors.New(string(output)))
	}
	balancer.owned[address] = true
	return nil
}

func (balancer *Balancer) address(ctx context.Context, service *core.Service) error {
	key := string(service.UID)
	if _, has := balancer.addresses[key]; !has {
		next := firstAddress
		for range balancer.addresses {
			next = next.Next()
		}
		if err := balancer.own(next.String()); err != nil {
			return err
		}
		balancer.addresses[key] = next
	}
	address := balancer.addresses[key].String()
	if known := service.Status.LoadBalancer.Ingress; len(known) == 1 && known[0].IP == address {
		return nil
	}
	changed := service.DeepCopy()
	changed.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: address}}
	_, err := balancer.client.CoreV1().Services(service.Namespace).UpdateStatus(ctx, changed, meta.UpdateOptions{})
	return err
}

func (balancer *Balancer) socket() string { return filepath.Join(balancer.folder, "socket") }

// configure starts HAProxy anew when the services are others; endpoints change while it runs.
func (balancer *Balancer) configure(fronts []front) error {
	var text strings.Builder
	fmt.Fprintf(&text, "global\n  stats socket %s mode 600 level admin expose-fd listeners\n  fd-hard-limit 100000\n"+
		"defaults\n  mode tcp\n  timeout connect 1s\n  timeout client 1h\n  timeout server 1h\n  retries 3\n  option redispatch 1\n",
		balancer.socket())
	var backends []string
	for _, front := range fronts {
		backends = append(backends, front.name())
		text.WriteString(front.section())
	}
	if len(backends) == 0 {
		return nil
	}
	if text.String() == balancer.running && syscall.Kill(balancer.process.Process.Pid, 0) == nil {
		return nil
	}
	return balancer.start(text.String(), backends)
}

func (balancer *Balancer) start(text string, backends []string) error {
	file := filepath.Join(balancer.folder, "haproxy.cfg")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	args := []string{"-db", "-f", file}
	if former := balancer.process; former != nil && syscall.Kill(former.Process.Pid, 0) == nil {
		// The new process takes over the listeners; the former one ends with its last connection.
		args = append(args, "-x", balancer.socket(), "-sf", fmt.Sprint(former.Process.Pid))
	}
	command := exec.Command("haproxy", args...)
	command.Stderr = os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := container.OnLastingThread(command.Start); err != nil {
		return err
	}
	go func() { _ = command.Wait() }()
	balancer.process, balancer.running = command, text
	balancer.servers = map[string][]netip.AddrPort{}
	for _, name := range backends {
		balancer.servers[name] = make([]netip.AddrPort, serversMax)
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		answer, err := balancer.ask("show info")
		if err == nil && strings.Contains(answer, fmt.Sprintf("\nPid: %d\n", command.Process.Pid)) {
			return nil
		}
		if time.Now().After(deadline) {
			balancer.running = ""
			return errors.Join(errors.New("HAProxy does not answer"), err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// fill makes the servers of a backend the ready endpoints.
func (balancer *Balancer) fill(backend, port string, endpoints []endpoint) error {
	servers, known := balancer.servers[backend]
	if !known {
		return nil
	}
	var wanted []netip.AddrPort
	for _, one := range endpoints {
		if number, has := one.ports[port]; has && one.isReady {
			wanted = append(wanted, netip.AddrPortFrom(one.address, number))
		}
	}
	for index, server := range servers {
		if server.IsValid() && !slices.Contains(wanted, server) {
			if err := balancer.set(backend, index, "state maint"); err != nil {
				return err
			}
			servers[index] = netip.AddrPort{}
		}
	}
	for _, server := range wanted {
		if slices.Contains(servers, server) {
			continue
		}
		index := slices.Index(servers, netip.AddrPort{})
		if index < 0 {
			return fmt.Errorf("%s has more than %d endpoints", backend, serversMax)
		}
		for _, change := range []string{fmt.Sprintf("addr %s port %d", server.Addr(), server.Port()), "state ready"} {
			if err := balancer.set(backend, index, change); err != nil {
				return err
			}
		}
		servers[index] = server
	}
	return nil
}

func (balancer *Balancer) set(backend string, index int, change string) error {
	answer, err := balancer.ask(fmt.Sprintf("set server %s/s%d %s", backend, index+1, change))
	// A change of the address is told in words.
	if answer = strings.TrimSpace(answer); err == nil && answer != "" && !strings.Contains(answer, "changed") && !strings.Contains(answer, "no need") {
		err = fmt.Errorf("%s/s%d %s: %s", backend, index+1, change, answer)
	}
	return err
}

func (balancer *Balancer) ask(command string) (string, error) {
	connection, err := net.DialTimeout("unix", balancer.socket(), time.Second)
	if err != nil {
		return "", err
	}
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := io.WriteString(connection, command+"\n"); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(connection)
	return string(answer), err
}

func canBalance() bool {
	_, err := exec.LookPath("haproxy")
	return err == nil
}
