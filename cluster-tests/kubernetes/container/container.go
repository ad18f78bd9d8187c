// Package container runs a program as a container's: in a root folder that is put together from the host, in namespaces of its own,
// as a user without privileges. It needs root.
//
// The program that links this package is its own helper: started under the name "container", it never reaches main. The package has
// few dependencies, so that this happens before larger packages set themselves up.
package container

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

const helperName = "container"

// Spec says what runs and what it sees.
type Spec struct {
	Args, Env        []string
	WorkingDirectory string
	HostName         string

	// Root is an empty folder of the host over which the container's root is mounted; nothing is written into it.
	Root         string
	RootReadOnly bool
	// Files of the container with their text.
	Files map[string]string
	// Mounts come after the rest of the root is there, the shorter path first.
	Mounts                     []Mount
	MaskedPaths, ReadOnlyPaths []string

	User, Group int
	Groups      []int
	// Capabilities are those that remain for root, and that a set-user-id file could gain.
	Capabilities    []string
	NoNewPrivileges bool

	// HasNetwork is set by Start.
	HasNetwork bool
}

// Mount shows a file or folder of the host in the container.
type Mount struct {
	Source, Target string
	ReadOnly       bool
}

// Process is a container that runs, or has ended.
type Process struct {
	Pid  int
	done chan struct{}
	code int
}

// The descriptors of the helper besides the standard ones.
const (
	specFile = 3 + iota
	statusFile
	networkFile
)

// Start returns when the program has taken over its process. A network of nil is that of the caller. Output goes to both files, which
// stay the caller's.
func Start(spec *Spec, network, stdout, stderr *os.File) (*Process, error) {
	started := *spec
	started.HasNetwork = network != nil
	text, err := json.Marshal(started)
	if err != nil {
		return nil, err
	}
	specRead, specWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer specRead.Close()
	defer specWrite.Close()
	statusRead, statusWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer statusRead.Close()
	defer statusWrite.Close()
	command := &exec.Cmd{
		Path:       "/proc/self/exe",
		Args:       []string{helperName},
		Env:        []string{},
		Stdout:     stdout,
		Stderr:     stderr,
		ExtraFiles: []*os.File{specRead, statusWrite},
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
			Pdeathsig:  syscall.SIGKILL,
			Setsid:     true,
		},
	}
	if network != nil {
		command.ExtraFiles = append(command.ExtraFiles, network)
	}
	if err := OnLastingThread(command.Start); err != nil {
		return nil, err
	}
	process := &Process{Pid: command.Process.Pid, done: make(chan struct{})}
	go process.wait(command)
	statusWrite.Close()
	if _, err := specWrite.Write(text); err != nil {
		return nil, err
	}
	specWrite.Close()
	failure, err := io.ReadAll(statusRead)
	if err == nil && len(failure) > 0 {
		err = errors.New(string(failure))
	}
	if err != nil {
		process.Signal(syscall.SIGKILL)
		<-process.done
		return nil, err
	}
	return process, nil
}

// Done is closed when the process has ended.
func (process *Process) Done() <-chan struct{} { return process.done }

// ExitCode is valid after Done; 128 and the number of the signal that ended it.
func (process *Process) ExitCode() int { return process.code }

// Signal does nothing when the process has ended.
func (process *Process) Signal(signal syscall.Signal) {
	select {
	case <-process.done:
	default:
		// It may be ending just now; its number is not given anew before wait has seen it.
		_ = syscall.Kill(process.Pid, signal)
	}
}

func (process *Process) wait(command *exec.Cmd) {
	// An exit code that is not 0 is no failure here.
	_ = command.Wait()
	status, _ := command.ProcessState.Sys().(syscall.WaitStatus)
	process.code = status.ExitStatus()
	if status.Signaled() {
		process.code = 128 + int(status.Signal())
	}
	close(process.done)
}

// Run runs a command in the namespaces and root of a container, as its user, and returns its output and exit code. The command is
// killed when cancel is closed.
func (process *Process) Run(spec *Spec, args []string, cancel <-chan struct{}) (stdout, stderr []byte, code int, err error) {
	enter := []string{"--target", fmt.Sprint(process.Pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--root",
		"--wd", "--setgid", fmt.Sprint(spec.Group), "--setuid", fmt.Sprint(spec.User), "--"}
	command := exec.Command("nsenter", append(enter, args...)...)
	command.Env = spec.Env
	var out, complaints bytes.Buffer
	command.Stdout, command.Stderr = &out, &complaints
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := OnLastingThread(command.Start); err != nil {
		return nil, nil, 0, err
	}
	ended := make(chan struct{})
	go func() {
		select {
		case <-cancel:
			_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
		case <-ended:
		}
	}()
	err = command.Wait()
	close(ended)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code, err = exit.ExitCode(), nil
	}
	return out.Bytes(), complaints.Bytes(), code, err
}

var lasting = make(chan func())

// OnLastingThread runs work on a thread that lives as long as the process: the kernel kills children whose starting thread ends.
func OnLastingThread(work func() error) error {
	result := make(chan error)
	lasting <- func() { result <- work() }
	return <-result
}

func lastingThread() {
	runtime.LockOSThread()
	for work := range lasting {
		work()
	}
}

func init() {
	if os.Args[0] == helperName {
		runtime.LockOSThread()
		err := become()
		status := os.NewFile(statusFile, "status")
		fmt.Fprint(status, err)
		os.Exit(1)
	}
	go lastingThread()
}
