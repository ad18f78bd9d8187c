//! The few things that only the C library offers.
#![expect(unsafe_code, reason = "system calls that the standard library does not wrap")]

use std::fs;
use std::io;
use std::mem;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

/// Greatest number of entries to which the table of open files is grown ahead; they take half a MB.
const ROOM_MAX: u64 = 1 << 16;

/// Lifts the soft limit on open files to the hard one, for this process and what it starts.
///
/// Returns the limit in force.
pub fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit that outlives both calls.
    let done = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 && {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) == 0
        }
    };
    if done { Ok(limit.rlim_cur) } else { Err(io::Error::last_os_error()) }
}

/// Grows the kernel's table of open files to `files` entries, before there are threads. Later each growth would stop a
/// thread that opens a file for 10 to 30 ms, since threads share the table.
pub fn make_room_for_files(files: u64) {
    let highest = files.clamp(1, ROOM_MAX) - 1;
    // SAFETY: both calls take numbers only, and no other code has the file of the second one.
    unsafe {
        let file = libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, highest);
        if file >= 0 {
            libc::close(file);
        }
    }
}

/// Returns an error that says what to do if a process may open fewer than `needed` files.
pub fn need_open_files(needed: u64) -> io::Result<()> {
    enough_open_files(raise_open_files()?, needed)
}

fn enough_open_files(limit: u64, needed: u64) -> io::Result<()> {
    if limit >= needed {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "a process may open {limit} files and {needed} are needed: raise the hard limit (ulimit -Hn) and log in again"
    )))
}

/// Nanoseconds on CLOCK_MONOTONIC, which all processes of the machine share.
pub fn monotonic_ns() -> u64 {
    let now = clock(libc::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC exists");
    u64::try_from(now.as_nanos()).expect("an uptime below five centuries")
}

/// User and system time that the process has used, threads that have ended included.
///
/// The same sum as in `/proc/<pid>/stat`, in nanoseconds rather than in ticks of 10 ms.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let mut id: libc::clockid_t = 0;
    // SAFETY: `id` is valid for the call to write to.
    match unsafe { libc::clock_getcpuclockid(pid_t(pid)?, &raw mut id) } {
        0 => clock(id),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Makes a command's process end with the thread that starts it, whatever ends the thread.
pub fn end_with_this(command: &mut Command) {
    // SAFETY: prctl takes plain values here, and may be called between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
}

/// Asks the process to stop (SIGTERM).
pub fn terminate(pid: u32) -> io::Result<()> {
    // SAFETY: kill takes plain values.
    match unsafe { libc::kill(pid_t(pid)?, libc::SIGTERM) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets the kernel choose the port of a bound socket when it connects, among the ports that are free for that peer.
/// Without this the kernel looks for a port that is free for every peer, which takes seconds of CPU if tens of
/// thousands were used a moment ago.
pub fn choose_port_late(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the socket is open, and `on` is a c_int that outlives the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const on).cast(),
            mem::size_of_val(&on) as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Restricts the threads of a process, and all that they start, to these cores.
pub fn pin(pid: u32, cores: Range<usize>) -> io::Result<()> {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for core in cores {
        // SAFETY: `set` is valid; a core beyond its size is passed over.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let id = thread?.file_name().to_string_lossy().parse().map_err(io::Error::other)?;
        // SAFETY: `set` is valid and has the stated size.
        let done = unsafe { libc::sched_setaffinity(id, size_of_val(&set), &raw const set) } == 0;
        let error = io::Error::last_os_error();
        // A thread may have ended meanwhile.
        if !done && error.raw_os_error() != Some(libc::ESRCH) {
            return Err(error);
        }
    }
    Ok(())
}

fn clock(id: libc::clockid_t) -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the call to write to.
    if unsafe { libc::clock_gettime(id, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    let nanoseconds = u32::try_from(time.tv_nsec).map_err(io::Error::other)?;
    Ok(Duration::new(seconds, nanoseconds))
}

fn pid_t(pid: u32) -> io::Result<libc::pid_t> {
    libc::pid_t::try_from(pid).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_the_files_before_they_are_opened() {
        let files = raise_open_files().expect("a limit");
        make_room_for_files(files);
        let status = fs::read_to_string("/proc/self/status").expect("of this process");
        let table_size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).expect("the room");
        assert!(
            table_size.trim().parse::<u64>().expect("a number") >= files.min(ROOM_MAX),
            "{table_size} for {files}"
        );
    }

    #[test]
    fn low_open_file_limit_error_says_what_to_raise() {
        assert!(enough_open_files(20_000, 20_000).is_ok());
        let error = enough_open_files(1_024, 20_000).expect_err("too few");
        assert!(error.to_string().contains("1024 files and 20000 are needed: raise the hard limit"));
    }
}
