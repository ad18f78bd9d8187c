//! The memory that the node may take, and whether it is near that: then no further client is let in, and those that are there stay.
//!
//! In a cgroup its own count decides, as the kernel's does, less the page cache: the kernel gives that up by itself, and beside a
//! store on the disk it would always be near the ceiling. The count has what the kernel itself takes for sockets, which is as much as
//! the node takes for an idle connection. Where the operator sets the ceiling, memory of the process alone counts. The allocator keeps
//! freed memory for a moment, so a node may refuse a little longer than it must.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::model::Limits;
use crate::telemetry::OFTEN;

/// From so much of the ceiling on no client is let in, until it is less than the second.
const FULL_PERCENT: u64 = 90;
const ROOM_PERCENT: u64 = 85;
const LOOK: Duration = Duration::from_millis(250);
const USED: &str = "fanfare_memory_used_bytes";
const CGROUPS: &str = "/sys/fs/cgroup";
/// In the first version of cgroups a number about as large as can be stands for none.
const NO_CEILING: u64 = 1 << 60;

/// The ceiling, and how the node stands to it.
#[derive(Debug, Default)]
pub struct Memory {
    ceiling: Option<Ceiling>,
    is_full: AtomicBool,
}

#[derive(Debug, PartialEq, Eq)]
struct Ceiling {
    max_bytes: u64,
    counted: Counted,
}

/// The memory that counts against a ceiling.
#[derive(Debug, PartialEq, Eq)]
enum Counted {
    /// Memory of the process that no file backs.
    Process,
    /// All of a cgroup with this folder, less its page cache.
    Cgroup { folder: PathBuf, names: &'static Names },
}

/// The names that a version of cgroups has for its files and for the rows of `memory.stat`.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    max: &'static str,
    used: &'static str,
    /// Pages of files, shared memory among them, which the kernel cannot give up.
    cache: &'static str,
    shared: &'static str,
}

static FIRST: Names = Names {
    max: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_cache ",
    shared: "total_shmem ",
};
static SECOND: Names = Names { max: "memory.max", used: "memory.current", cache: "file ", shared: "shmem " };

impl Memory {
    /// The ceiling is that of the configuration, else that of the cgroup, if it has one. The configuration cannot raise it.
    pub fn open(limits: &Limits) -> Arc<Self> {
        let of_cgroup = || {
            let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            Ceiling::of_cgroup(&own, Path::new(CGROUPS))
        };
        let of_limits = match limits.memory_bytes {
            0 => None,
            max_bytes => Some(Ceiling { max_bytes, counted: Counted::Process }),
        };
        let ceiling = match (of_limits, of_cgroup()) {
            (Some(own), Some(around)) if own.max_bytes > around.max_bytes => Some(around),
            (own, around) => own.or(around),
        };
        let memory = Arc::new(Self { ceiling, is_full: AtomicBool::new(false) });
        memory.tell();
        memory
    }

    /// No further client is let in.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Looks again and again; ends at once where there is no ceiling.
    pub async fn watch(self: Arc<Self>) {
        let Some(ceiling) = &self.ceiling else { return };
        loop {
            self.look(ceiling.max_bytes, ceiling.used_bytes());
            tokio::time::sleep(LOOK).await;
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "no machine has 2^52 bytes")]
    fn tell(&self) {
        metrics::gauge!(USED).set(0.0);
        let max_bytes = self.ceiling.as_ref().map_or(0, |ceiling| ceiling.max_bytes);
        metrics::gauge!("fanfare_memory_max_bytes").set(max_bytes as f64);
    }

    #[expect(clippy::cast_precision_loss, reason = "no machine has 2^52 bytes")]
    fn look(&self, max_bytes: u64, used_bytes: u64) {
        metrics::gauge!(USED).set(used_bytes as f64);
        let was_full = self.is_full();
        let percent = if was_full { ROOM_PERCENT } else { FULL_PERCENT };
        let is_full = used_bytes >= max_bytes / 100 * percent;
        self.is_full.store(is_full, Ordering::Relaxed);
        match (was_full, is_full) {
            (false, true) => {
                tracing::warn!(target: OFTEN, used_bytes, max_bytes, "memory is short: new connections are refused");
            }
            (true, false) => {
                tracing::info!(target: OFTEN, used_bytes, max_bytes, "memory is free: new connections are taken");
            }
            _ => {}
        }
    }
}

impl Ceiling {
    /// The lowest of the process's own cgroup and those that it is in. `own` is what `/proc/self/cgroup` says.
    fn of_cgroup(own: &str, cgroups: &Path) -> Option<Self> {
        let lines = || own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let of = |controllers: &str| lines().find(|(own, _)| own.split(',').any(|one| one == controllers));
        let second = of("").map(|(_, path)| (cgroups.to_owned(), path, &SECOND));
        let first = of("memory").map(|(_, path)| (cgroups.join("memory"), path, &FIRST));
        let ceilings = [second, first].into_iter().flatten().flat_map(|(root, path, names)| {
            // Within a container the path may be that of the machine, and its own folder is the root.
            let folder = root.join(path.trim_start_matches('/'));
            let folders: Vec<PathBuf> = folder
                .ancestors()
                .take_while(|folder| folder.starts_with(&root))
                .map(Path::to_owned)
                .collect();
            folders.into_iter().filter_map(move |folder| {
                let text = std::fs::read_to_string(folder.join(names.max)).ok()?;
                let max_bytes = text.trim().parse().ok().filter(|max_bytes| *max_bytes < NO_CEILING)?;
                Some(Self { max_bytes, counted: Counted::Cgroup { folder, names } })
            })
        });
        ceilings.min_by_key(|ceiling| ceiling.max_bytes)
    }

    fn used_bytes(&self) -> u64 {
        let of_cgroup = match &self.counted {
            Counted::Cgroup { folder, names } => names.used_bytes(folder),
            Counted::Process => None,
        };
        of_cgroup.unwrap_or_else(|| {
            let status = read(Path::new("/proc/self/status"));
            let kilobytes = ["RssAnon:", "RssShmem:"].map(|name| number_of(&status, name).unwrap_or(0));
            kilobytes.iter().sum::<u64>() * 1024
        })
    }
}

impl Names {
    fn used_bytes(&self, folder: &Path) -> Option<u64> {
        let used: u64 = read(&folder.join(self.used)).trim().parse().ok()?;
        let parts = read(&folder.join("memory.stat"));
        let cache =
            number_of(&parts, self.cache)?.saturating_sub(number_of(&parts, self.shared).unwrap_or(0));
        Some(used.saturating_sub(cache))
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The number behind a name at the beginning of a line.
fn number_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
