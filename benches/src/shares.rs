//! Shares of a profile, each sample counted once: `perf script -F comm,ip,sym | bench shares`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead};

use crate::Result;

/// Steps of a delivery, each with its functions of Linux 6. A sample belongs to the innermost of its functions that is
/// in any step.
const STEPS: [(&str, &[&str]); 14] = [
    ("waking who reads", &["sock_def_readable"]),
    ("acks of who reads", &["tcp_ack", "tcp_send_ack", "__tcp_send_ack"]),
    ("copying what is sent", &["_copy_from_iter", "skb_do_copy_data_nocache"]),
    (
        "memory of segments",
        &[
            "tcp_stream_alloc_skb",
            "__alloc_skb",
            "skb_page_frag_refill",
            "sk_page_frag_refill",
            "skb_release_data",
            "skb_defer_free_flush",
            "napi_consume_skb",
            "__kfree_skb",
            "kfree_skbmem",
            "skb_attempt_defer_free",
        ],
    ),
    ("timers", &["sk_reset_timer", "__mod_timer", "hrtimer_start_range_ns"]),
    ("TCP, to take a segment", &["tcp_v4_rcv", "tcp_v4_do_rcv", "tcp_rcv_established", "tcp_data_queue"]),
    (
        "IP and the queue of the device, on the way in",
        &[
            "net_rx_action",
            "process_backlog",
            "__netif_receive_skb_one_core",
            "ip_rcv",
            "ip_local_deliver_finish",
            "handle_softirqs",
            "do_softirq.part.0",
        ],
    ),
    ("the device", &["__dev_queue_xmit", "dev_hard_start_xmit", "loopback_xmit"]),
    ("IP, on the way out", &["__ip_queue_xmit", "ip_output", "ip_finish_output2"]),
    (
        "TCP, to make a segment",
        &["__tcp_transmit_skb", "tcp_write_xmit", "__tcp_push_pending_frames", "tcp_event_new_data_sent"],
    ),
    ("TCP, to take what is sent", &["tcp_sendmsg", "tcp_sendmsg_locked", "inet_sendmsg", "release_sock"]),
    (
        "io_uring",
        &[
            "__do_sys_io_uring_enter",
            "io_submit_sqes",
            "io_issue_sqe",
            "io_sendmsg",
            "io_send",
            "____sys_sendmsg",
            "io_sendmsg_setup",
        ],
    ),
    (
        "other work of the kernel",
        &[
            "do_syscall_64",
            "entry_SYSCALL_64_after_hwframe",
            "asm_exc_page_fault",
            "asm_sysvec_apic_timer_interrupt",
            "ret_from_fork_asm",
        ],
    ),
    ("the server itself", &[]),
];

/// Reads a profile in the form of `perf script`, one stack in each block of lines, and prints a table.
///
/// # Errors
///
/// Returns an error if the profile cannot be read or has no stack.
pub fn print() -> Result<()> {
    print!("{}", table(io::stdin().lock())?);
    Ok(())
}

fn table(profile: impl BufRead) -> Result<String> {
    let steps: BTreeMap<&str, usize> = STEPS
        .iter()
        .enumerate()
        .flat_map(|(at, (_, names))| names.iter().map(move |name| (*name, at)))
        .collect();
    let (mut counts, mut stack) = ([0_u64; STEPS.len()], None);
    let mut take = |stack: &mut Option<Option<usize>>| {
        if let Some(step) = stack.take() {
            counts[step.unwrap_or(STEPS.len() - 1)] += 1;
        }
    };
    for line in profile.lines() {
        let line = line?;
        // `comm`, then one line for each function: an address and its name.
        match line.strip_prefix(['\t', ' ']).map(str::trim) {
            Some(frame) if !frame.is_empty() => {
                let name = frame.split_whitespace().nth(1).unwrap_or_default();
                let name = name.split_once('+').map_or(name, |(name, _)| name);
                let step = stack.get_or_insert(None);
                *step = step.or_else(|| steps.get(name).copied());
            }
            _ => take(&mut stack),
        }
    }
    take(&mut stack);
    let all: u64 = counts.iter().sum();
    if all == 0 {
        return Err("no stack was read: perf script -F comm,ip,sym | bench shares".into());
    }
    let mut text = format!("| of {all} samples | % |\n|---|---|\n");
    for ((step, _), count) in STEPS.iter().zip(counts) {
        let _ = writeln!(text, "| {step} | {:.1} |", 100.0 * count as f64 / all as f64);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_belongs_to_the_innermost_step() {
        let profile = "\
shard
\tffff1 _raw_spin_unlock_irqrestore ([kernel.kallsyms])
\tffff2 sock_def_readable+0x1c ([kernel.kallsyms])
\tffff3 tcp_v4_rcv ([kernel.kallsyms])
\tffff4 tcp_sendmsg ([kernel.kallsyms])

shard
\tffff3 tcp_v4_rcv ([kernel.kallsyms])
\tffff4 tcp_sendmsg ([kernel.kallsyms])

shard
\t5555 fanfare::hub::publish (/bin/fanfare)

shard
\t5556 main (/bin/fanfare)
";
        let table = table(profile.as_bytes()).expect("there are stacks");
        assert!(table.starts_with("| of 4 samples | % |\n"), "{table}");
        for row in [
            "| waking who reads | 25.0 |",
            "| TCP, to take a segment | 25.0 |",
            "| the server itself | 50.0 |",
        ] {
            assert!(table.contains(row), "{table}");
        }
        assert_eq!(table.matches(" 0.0 ").count(), STEPS.len() - 3);
    }

    #[test]
    fn nothing_is_no_profile() {
        assert!(table("".as_bytes()).is_err());
        assert!(table("shard\n\n".as_bytes()).is_err());
    }

    #[test]
    fn a_function_is_in_one_step() {
        let mut names: Vec<_> = STEPS.iter().flat_map(|(_, names)| names.iter()).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
