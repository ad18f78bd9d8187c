package container

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// setThreadUser changes this thread alone; the functions of the standard library would change all threads, and wait for each.
func setThreadUser(user, group int, groups []uint32) error {
	var first unsafe.Pointer
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0])
	}
	if _, _, failure := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0); failure != 0 {
		return fmt.Errorf("setgroups: %w", failure)
	}
	if _, _, failure := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(group), uintptr(group), uintptr(group)); failure != 0 {
		return fmt.Errorf("setresgid: %w", failure)
	}
	if _, _, failure := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(user), uintptr(user), uintptr(user)); failure != 0 {
		return fmt.Errorf("setresuid: %w", failure)
	}
	return nil
}
