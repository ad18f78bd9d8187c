//! Calls of the operating system.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// Raises the limit of open files of this process and of the nodes that it starts to `files`, up to the hard limit.
#[expect(unsafe_code, reason = "setrlimit has no safe form in std; both pointers are to a live local")]
pub(crate) fn raise_open_files(files: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if known && limit.rlim_cur < files {
        limit.rlim_cur = files.min(limit.rlim_max);
        // A failure shows when the files are opened.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Gives the greatest resident memory of a process so far, in bytes.
pub(crate) fn peak_resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.expect("a count of KiB") * 1024
}

/// Limits the open files of a command that is started.
#[expect(
    unsafe_code,
    reason = "a child's limits are set between fork and exec, where setrlimit is safe to call"
)]
pub(crate) fn limit_open_files(command: &mut std::process::Command, files: u64) {
    use std::os::unix::process::CommandExt as _;
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    let set = move || match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    unsafe { command.pre_exec(set) };
}

/// Limits the open files of a running process; its hard limit stays. Gives the former limit.
#[expect(unsafe_code, reason = "prlimit has no safe form in std; both pointers are to live locals")]
pub(crate) fn limit_open_files_of(pid: u32, files: u64) -> u64 {
    let pid = libc::pid_t::try_from(pid).expect("a process id");
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let read = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut before) };
    let after = libc::rlimit { rlim_cur: files, ..before };
    let set = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const after, std::ptr::null_mut()) };
    assert_eq!((read, set), (0, 0), "the limit of open files of process {pid} cannot be set");
    before.rlim_cur
}

/// Gives the highest number of an open file of a process.
pub(crate) fn highest_file(pid: u32) -> u64 {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process lives");
    let numbers = files.filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok());
    numbers.max().expect("a process has open files")
}

/// Reports that a test is skipped because something is missing, which is a failure in CI.
pub fn not_run(why: &str) {
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI needs what is missing: {why}");
    // The macros' output is shown for failed tests only.
    io::stderr().write_all(format!("NOT RUN: {why}\n").as_bytes()).expect("standard error takes it");
}

/// Asks a process to stop (SIGTERM).
pub(crate) fn terminate(pid: u32) {
    signal(pid, libc::SIGTERM);
}

/// Asks a process to stop as Ctrl-C does (SIGINT).
pub(crate) fn interrupt(pid: u32) {
    signal(pid, libc::SIGINT);
}

/// Stalls a process (SIGSTOP), until [`resume`].
pub(crate) fn pause(pid: u32) {
    signal(pid, libc::SIGSTOP);
}

/// Whether no thread of a process runs, which is true a moment after [`pause`].
pub(crate) fn is_stopped(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
    threads.filter_map(Result::ok).all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'))
    })
}

/// Gives the number of times that the threads of this name in a process were woken.
pub(crate) fn woken(pid: u32, name: &str) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
    let of_thread = |path: &Path| {
        let is_named = std::fs::read_to_string(path.join("comm")).ok()?.trim_end() == name;
        let status = std::fs::read_to_string(path.join("status")).ok().filter(|_| is_named)?;
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        Some(count.trim().parse::<u64>().expect("a count"))
    };
    threads.filter_map(Result::ok).filter_map(|thread| of_thread(&thread.path())).sum()
}

pub(crate) fn signal_in_vain(pid: u32) {
    signal(pid, libc::SIGUSR1);
    signal(pid, libc::SIGUSR2);
}

pub(crate) fn resume(pid: u32) {
    signal(pid, libc::SIGCONT);
}

#[expect(unsafe_code, reason = "kill has no safe form in std; it touches no memory of this process")]
fn signal(pid: u32, signal: libc::c_int) {
    let pid = libc::pid_t::try_from(pid).expect("a process id");
    assert!(unsafe { libc::kill(pid, signal) } == 0, "process {pid} is not there to be signalled");
}

/// Gives the resident memory of a process, in bytes.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    const PAGE_BYTES: u64 = 4096;
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("the process runs");
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a page count");
    pages * PAGE_BYTES
}

/// Passes an open file of this process to a command that is started, under the same number.
#[expect(
    unsafe_code,
    reason = "a child's files are chosen between fork and exec, where fcntl is safe to call"
)]
pub(crate) fn hand_down(command: &mut std::process::Command, file: std::os::fd::RawFd) {
    use std::os::unix::process::CommandExt as _;
    let keep = move || match unsafe { libc::fcntl(file, libc::F_SETFD, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    unsafe { command.pre_exec(keep) };
}

/// Puts this thread, and all that it starts, into a new network namespace. The namespace ends with its last process and
/// open file.
#[expect(unsafe_code, reason = "unshare has no safe form in std; it touches no memory of this process")]
pub(crate) fn leave_network() -> io::Result<File> {
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    File::open("/proc/thread-self/ns/net")
}

/// Puts this thread, and all that it starts, into that network namespace.
#[expect(unsafe_code, reason = "setns has no safe form in std; the file is open while it is called")]
pub(crate) fn enter_network(network: &File) {
    let entered = unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) } == 0;
    assert!(entered, "cannot enter a network: {}", io::Error::last_os_error());
}
