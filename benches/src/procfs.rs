//! Memory, machine and kernel, read from `/proc` and `/sys`.

use std::{fs, io};

/// Resident memory of a process, in bytes.
pub fn resident_bytes(pid: u32) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).and_then(first_number);
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other("no VmRSS in /proc/<pid>/status"))
}

/// Gives the resident memory of these processes together, in bytes.
pub fn resident_bytes_of(pids: &[u32]) -> io::Result<u64> {
    pids.iter().map(|pid| resident_bytes(*pid)).sum()
}

/// Gives the size of the buffers of all TCP sockets of the machine, in bytes.
pub fn socket_bytes() -> io::Result<u64> {
    let sockstat = fs::read_to_string("/proc/net/sockstat")?;
    let tcp = sockstat.lines().find_map(|line| line.strip_prefix("TCP:"));
    let pages = tcp.and_then(|line| line.split_once(" mem ")).and_then(|(_, after)| first_number(after));
    pages.map(|pages| pages * PAGE_BYTES).ok_or_else(|| io::Error::other("no TCP mem in /proc/net/sockstat"))
}

/// TCP segments with data that the machine has sent since its start, without retransmissions.
pub fn segments_sent() -> io::Result<u64> {
    let netstat = fs::read_to_string("/proc/net/netstat")?;
    counter_of(&netstat, "TcpExt:", "TCPOrigDataSent")
        .ok_or_else(|| io::Error::other("no TCPOrigDataSent in /proc/net/netstat"))
}

/// Finds a counter. Each group has a line with the names, then one with the counts.
fn counter_of(netstat: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix(group)).map(str::split_whitespace);
    let (mut names, mut counts) = (lines.next()?, lines.next()?);
    counts.nth(names.position(|other| other == name)?)?.parse().ok()
}

/// Unit of `mem` in sockstat.
const PAGE_BYTES: u64 = 4096;

pub fn cpu_model() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    model.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned())
}

pub fn kernel() -> String {
    line_of("/proc/sys/kernel/osrelease")
}

/// Gives the default congestion control of TCP, such as `cubic`.
pub fn congestion_control() -> String {
    line_of("/proc/sys/net/ipv4/tcp_congestion_control")
}

/// Mitigation of the kernel for indirect calls, such as `Mitigation: Retpolines; …`.
pub fn spectre_v2() -> String {
    line_of("/sys/devices/system/cpu/vulnerabilities/spectre_v2")
}

fn line_of(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_found_by_its_name() {
        let netstat = "TcpExt: One TCPOrigDataSent Two\nTcpExt: 7 42 9\nIpExt: One\nIpExt: 1\n";
        assert_eq!(counter_of(netstat, "TcpExt:", "TCPOrigDataSent"), Some(42));
        assert_eq!(counter_of(netstat, "IpExt:", "TCPOrigDataSent"), None);
    }
}
