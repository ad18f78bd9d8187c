package pods

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
)

type network struct {
	options Options

	lock sync.Mutex
	// The address given last.
	next netip.Addr
	used map[netip.Addr]bool
}

// A link is a pod's network namespace, which has no name and lasts until it is closed and its processes have ended.
type link struct {
	network   *network
	address   netip.Addr
	device    string
	namespace *os.File
}

func (network *network) connect(pod string) (*link, error) {
	namespace, err := newNamespace()
	if err != nil {
		return nil, fmt.Errorf("a network namespace: %w", err)
	}
	made := &link{network: network, device: "pod" + pod[:10], namespace: namespace}
	if made.address, err = network.take(); err == nil {
		err = made.wire()
	}
	if err != nil {
		made.close()
		return nil, err
	}
	return made, nil
}

func (made *link) wire() error {
	options, inside := made.network.options, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), made.namespace.Fd())
	err := ip(nil, fmt.Sprintf("link add %s type veth peer name eth0 netns %s\nlink set %s master %s up\n",
		made.device, inside, made.device, options.Bridge))
	if err != nil {
		return err
	}
	return ip([]string{"nsenter", "--net=" + inside}, fmt.Sprintf("link set lo up\naddress add %s/16 dev eth0\nlink set eth0 up\n"+
		"route add default via %s\n", made.address, options.Gateway))
}

func (made *link) close() {
	// At once, and not when the last process has ended.
	_ = ip(nil, fmt.Sprintf("link delete %s\n", made.device))
	made.namespace.Close()
	made.network.lock.Lock()
	defer made.network.lock.Unlock()
	delete(made.network.used, made.address)
}

// take gives each address of the network in turn, so that one is not used again soon.
func (network *network) take() (netip.Addr, error) {
	network.lock.Lock()
	defer network.lock.Unlock()
	if network.used == nil {
		network.used = map[netip.Addr]bool{}
	}
	prefix := network.options.Network
	for range 1 << (32 - prefix.Bits()) {
		network.next = network.next.Next()
		if !prefix.Contains(network.next.Next()) {
			network.next = prefix.Addr().Next()
		}
		if !network.used[network.next] {
			network.used[network.next] = true
			return network.next, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("all addresses of %s are in use", prefix)
}

func newNamespace() (*os.File, error) {
	type result struct {
		file *os.File
		err  error
	}
	made := make(chan result)
	go func() {
		// Never unlocked, so that the thread ends with its namespace.
		runtime.LockOSThread()
		err := syscall.Unshare(syscall.CLONE_NEWNET)
		var file *os.File
		if err == nil {
			file, err = os.Open("/proc/thread-self/ns/net")
		}
		made <- result{file, err}
	}()
	got := <-made
	return got.file, got.err
}

func ip(within []string, commands string) error {
	args := append(within, "ip", "-batch", "-")
	command := exec.Command(args[0], args[1:]...)
	command.Stdin = strings.NewReader(commands)
	if output, err := command.CombinedOutput(); err != nil {
		return errors.Join(err, errors.New(string(output)))
	}
	return nil
}
