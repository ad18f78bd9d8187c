package container

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Of the host, as far as it has them: about what an image with the C library and certificates but without a shell holds.
var (
	hostFolders = []string{"/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ssl", "/usr/share/zoneinfo",
		"/usr/share/ca-certificates"}
	hostFiles   = []string{"/etc/ld.so.cache"}
	ownFolders  = []string{"/proc", "/sys", "/dev", "/run", "/usr/local/bin"}
	hostDevices = []string{"null", "zero", "full", "random", "urandom", "tty"}
)

// become turns this process, the first of its namespaces, into the container's program; it returns only when that fails.
func become() error {
	// The program must not inherit them.
	for _, file := range []int{specFile, statusFile} {
		unix.CloseOnExec(file)
	}
	var spec Spec
	if err := json.NewDecoder(os.NewFile(specFile, "spec")).Decode(&spec); err != nil {
		return err
	}
	if spec.HasNetwork {
		unix.CloseOnExec(networkFile)
		if err := unix.Setns(networkFile, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("network: %w", err)
		}
	}
	for _, step := range []func(*Spec) error{makeRoot, enterRoot, reduce} {
		if err := step(&spec); err != nil {
			return err
		}
	}
	return run(&spec)
}

func makeRoot(spec *Spec) error {
	root := spec.Root
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	if err := unix.Mount("root", root, "tmpfs", unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount of the root: %w", err)
	}
	for _, folder := range ownFolders {
		if err := os.MkdirAll(root+folder, 0o755); err != nil {
			return err
		}
	}
	for _, folder := range []string{"/tmp", "/var/tmp"} {
		if err := errors.Join(os.MkdirAll(root+folder, 0o755), os.Chmod(root+folder, 0o1777)); err != nil {
			return err
		}
	}
	if err := os.Symlink("../run", root+"/var/run"); err != nil {
		return err
	}
	if err := showHost(root); err != nil {
		return err
	}
	for path, text := range spec.Files {
		if err := os.MkdirAll(filepath.Dir(root+path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(root+path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := unix.Mount("proc", root+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount of /proc: %w", err)
	}
	// It shows the devices of the network; where it cannot be had it is left out.
	_ = unix.Mount("sysfs", root+"/sys", "sysfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if err := makeDevices(root); err != nil {
		return err
	}
	sort.SliceStable(spec.Mounts, func(a, b int) bool {
		return strings.Count(spec.Mounts[a].Target, "/") < strings.Count(spec.Mounts[b].Target, "/")
	})
	for _, mount := range spec.Mounts {
		if err := bind(mount.Source, root+filepath.Clean("/"+mount.Target), mount.ReadOnly); err != nil {
			return err
		}
	}
	return hide(spec)
}

func showHost(root string) error {
	for _, path := range append(hostFolders, hostFiles...) {
		information, err := os.Lstat(path)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return err
		}
		if information.Mode()&os.ModeSymlink != 0 {
			target, err := os.Readlink(path)
			if err == nil {
				err = os.Symlink(target, root+path)
			}
			if err != nil {
				return err
			}
			continue
		}
		if err := bind(path, root+path, true); err != nil {
			return err
		}
	}
	return nil
}

func makeDevices(root string) error {
	devices := root + "/dev"
	if err := unix.Mount("devices", devices, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return fmt.Errorf("mount of /dev: %w", err)
	}
	for _, name := range hostDevices {
		if err := bind("/dev/"+name, devices+"/"+name, false); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		if err := os.Symlink(target, devices+"/"+name); err != nil {
			return err
		}
	}
	if err := os.Mkdir(devices+"/shm", 0o755); err != nil {
		return err
	}
	return unix.Mount("shm", devices+"/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777,size=64m")
}

func bind(source, target string, readOnly bool) error {
	information, err := os.Stat(source)
	if err != nil {
		return err
	}
	if information.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
		var file *os.File
		if file, err = os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644); err == nil {
			err = file.Close()
		}
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount of %s: %w", source, err)
	}
	if !readOnly {
		return nil
	}
	return remountReadOnly(target)
}

func remountReadOnly(path string) error {
	var now unix.Statfs_t
	if err := unix.Statfs(path, &now); err != nil {
		return err
	}
	kept := uintptr(now.Flags) & (unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_NODIRATIME)
	if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|kept, ""); err != nil {
		return fmt.Errorf("%s read-only: %w", path, err)
	}
	return nil
}

func hide(spec *Spec) error {
	for _, path := range spec.ReadOnlyPaths {
		if _, err := os.Lstat(spec.Root + path); err != nil {
			continue
		}
		if err := bind(spec.Root+path, spec.Root+path, true); err != nil {
			return err
		}
	}
	for _, path := range spec.MaskedPaths {
		information, err := os.Lstat(spec.Root + path)
		switch {
		case err != nil:
			continue
		case information.IsDir():
			err = unix.Mount("masked", spec.Root+path, "tmpfs", unix.MS_RDONLY, "size=0")
		default:
			err = unix.Mount("/dev/null", spec.Root+path, "", unix.MS_BIND, "")
		}
		if err != nil {
			return fmt.Errorf("mask of %s: %w", path, err)
		}
	}
	return nil
}

func enterRoot(spec *Spec) error {
	host := spec.Root + "/host"
	if err := os.Mkdir(host, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot(spec.Root, host); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/host", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount of the host: %w", err)
	}
	if err := os.Remove("/host"); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.HostName)); err != nil {
		return err
	}
	if spec.RootReadOnly {
		return remountReadOnly("/")
	}
	return nil
}

var capabilityNumbers = map[string]uint{
	"CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
	"LINUX_IMMUTABLE": 9, "NET_BIND_SERVICE": 10, "NET_BROADCAST": 11, "NET_ADMIN": 12, "NET_RAW": 13, "IPC_LOCK": 14, "IPC_OWNER": 15,
	"SYS_MODULE": 16, "SYS_RAWIO": 17, "SYS_CHROOT": 18, "SYS_PTRACE": 19, "SYS_PACCT": 20, "SYS_ADMIN": 21, "SYS_BOOT": 22,
	"SYS_NICE": 23, "SYS_RESOURCE": 24, "SYS_TIME": 25, "SYS_TTY_CONFIG": 26, "MKNOD": 27, "LEASE": 28, "AUDIT_WRITE": 29,
	"AUDIT_CONTROL": 30, "SETFCAP": 31, "MAC_OVERRIDE": 32, "MAC_ADMIN": 33, "SYSLOG": 34, "WAKE_ALARM": 35, "BLOCK_SUSPEND": 36,
	"AUDIT_READ": 37, "PERFMON": 38, "BPF": 39, "CHECKPOINT_RESTORE": 40,
}

// reduce gives up all that the program may not have. Each call is for this thread alone, which becomes the program.
func reduce(spec *Spec) error {
	var kept uint64
	for _, name := range spec.Capabilities {
		number, known := capabilityNumbers[strings.TrimPrefix(name, "CAP_")]
		if !known {
			return fmt.Errorf("no capability named %q", name)
		}
		kept |= 1 << number
	}
	for number := range uint(64) {
		if kept&(1<<number) != 0 {
			continue
		}
		// Refused for numbers that this kernel does not have.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("bounding set: %w", err)
		}
	}
	groups := make([]uint32, len(spec.Groups))
	for index, group := range spec.Groups {
		groups[index] = uint32(group)
	}
	if err := setThreadUser(spec.User, spec.Group, groups); err != nil {
		return err
	}
	if spec.User == 0 {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		low, high := uint32(kept), uint32(kept>>32)
		data := [2]unix.CapUserData{{Effective: low, Permitted: low}, {Effective: high, Permitted: high}}
		if err := unix.Capset(&header, &data[0]); err != nil {
			return fmt.Errorf("capset: %w", err)
		}
	}
	if spec.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return err
		}
	}
	// The kernel forgets it when the user changes. Should the parent have ended meanwhile, its end of the status pipe is closed.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	poll := []unix.PollFd{{Fd: statusFile}}
	if _, err := unix.Poll(poll, 0); err == nil && poll[0].Revents&unix.POLLERR != 0 {
		return errors.New("the parent has ended")
	}
	return nil
}

func run(spec *Spec) error {
	unix.Umask(0o022)
	if err := unix.Chdir(spec.WorkingDirectory); err != nil {
		return fmt.Errorf("working directory %s: %w", spec.WorkingDirectory, err)
	}
	os.Clearenv()
	for _, variable := range spec.Env {
		if name, value, is := strings.Cut(variable, "="); is {
			_ = os.Setenv(name, value)
		}
	}
	program, err := exec.LookPath(spec.Args[0])
	if err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", program, syscall.Exec(program, spec.Args, spec.Env))
}
