//! Memory limit of the node. Near the limit no further client is admitted; connected clients stay.
//!
//! In a cgroup the cgroup's own count decides, less the page cache: the kernel reclaims the cache by itself, and with a store on disk the
//! count would always be near the limit. The count includes the kernel's memory for sockets, about as much as the node itself takes for an
//! idle connection. With a limit set by the operator only memory of the process counts. The allocator keeps freed memory for a moment, so a
//! node may refuse a little longer than needed.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::model::Limits;
use crate::telemetry::RATE_LIMITED;

/// Percentage of the limit from which on no client is admitted, until memory falls below [`RESUME_PERCENT`].
const FULL_PERCENT: u64 = 90;
const RESUME_PERCENT: u64 = 85;
const LOOK: Duration = Duration::from_millis(250);
const USED: &str = "fanfare_memory_used_bytes";
const CGROUPS: &str = "/sys/fs/cgroup";
/// Value from which on a number counts as no limit: version 1 of cgroups writes a very large number instead.
const NO_CEILING: u64 = 1 << 60;

/// Monitor of the memory limit.
#[derive(Debug, Default)]
pub struct MemoryMonitor {
    ceiling: Option<MemoryCeiling>,
    is_full: AtomicBool,
}

#[derive(Debug, PartialEq, Eq)]
struct MemoryCeiling {
    max_bytes: u64,
    counted: MemorySource,
}

/// Source of the memory count.
#[derive(Debug, PartialEq, Eq)]
enum MemorySource {
    /// Memory of the process that is not backed by files.
    Process,
    /// Memory of the cgroup with this folder, less its page cache.
    Cgroup { folder: PathBuf, names: &'static CgroupFiles },
}

/// Names of files and of rows in `memory.stat` in one version of cgroups.
#[derive(Debug, PartialEq, Eq)]
struct CgroupFiles {
    max: &'static str,
    used: &'static str,
    /// Page cache; `shared` is the part of it that the kernel cannot reclaim.
    cache: &'static str,
    shared: &'static str,
}

static FIRST: CgroupFiles = CgroupFiles {
    max: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_cache ",
    shared: "total_shmem ",
};
static SECOND: CgroupFiles =
    CgroupFiles { max: "memory.max", used: "memory.current", cache: "file ", shared: "shmem " };

impl MemoryMonitor {
    /// Reads the limit from the configuration, or else from the cgroup if it has one. The configuration cannot raise the cgroup's limit.
    pub fn open(limits: &Limits) -> Arc<Self> {
        let of_cgroup = || {
            let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            MemoryCeiling::of_cgroup(&own, Path::new(CGROUPS))
        };
        let of_limits = match limits.memory_bytes {
            0 => None,
            max_bytes => Some(MemoryCeiling { max_bytes, counted: MemorySource::Process }),
        };
        let ceiling = match (of_limits, of_cgroup()) {
            (Some(own), Some(around)) if own.max_bytes > around.max_bytes => Some(around),
            (own, around) => own.or(around),
        };
        let memory = Arc::new(Self { ceiling, is_full: AtomicBool::new(false) });
        memory.set_gauges();
        memory
    }

    /// True while no further client is admitted.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Measures memory periodically. Returns at once without a limit.
    pub async fn watch(self: Arc<Self>) {
        let Some(ceiling) = &self.ceiling else { return };
        loop {
            self.look(ceiling.max_bytes, ceiling.used_bytes());
            tokio::time::sleep(LOOK).await;
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "no machine has 2^52 bytes")]
    fn set_gauges(&self) {
        metrics::gauge!(USED).set(0.0);
        let max_bytes = self.ceiling.as_ref().map_or(0, |ceiling| ceiling.max_bytes);
        metrics::gauge!("fanfare_memory_max_bytes").set(max_bytes as f64);
    }

    #[expect(clippy::cast_precision_loss, reason = "no machine has 2^52 bytes")]
    fn look(&self, max_bytes: u64, used_bytes: u64) {
        metrics::gauge!(USED).set(used_bytes as f64);
        let was_full = self.is_full();
        let percent = if was_full { RESUME_PERCENT } else { FULL_PERCENT };
        let is_full = used_bytes >= max_bytes / 100 * percent;
        self.is_full.store(is_full, Ordering::Relaxed);
        match (was_full, is_full) {
            (false, true) => {
                tracing::warn!(target: RATE_LIMITED, used_bytes, max_bytes, "memory near the ceiling: new connections are refused");
            }
            (true, false) => {
                tracing::info!(target: RATE_LIMITED, used_bytes, max_bytes, "memory below the ceiling: new connections are accepted");
            }
            _ => {}
        }
    }
}

impl MemoryCeiling {
    /// Lowest limit of the process's own cgroup and its ancestors. `own` is the text of `/proc/self/cgroup`.
    fn of_cgroup(own: &str, cgroups: &Path) -> Option<Self> {
        let lines = || own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let of = |controllers: &str| lines().find(|(own, _)| own.split(',').any(|one| one == controllers));
        let second = of("").map(|(_, path)| (cgroups.to_owned(), path, &SECOND));
        let first = of("memory").map(|(_, path)| (cgroups.join("memory"), path, &FIRST));
        let ceilings = [second, first].into_iter().flatten().flat_map(|(root, path, names)| {
            // In a container the path may be that of the host, and the container's own folder is the root.
            let folder = root.join(path.trim_start_matches('/'));
            let folders: Vec<PathBuf> = folder
                .ancestors()
                .take_while(|folder| folder.starts_with(&root))
                .map(Path::to_owned)
                .collect();
            folders.into_iter().filter_map(move |folder| {
                let text = std::fs::read_to_string(folder.join(names.max)).ok()?;
                let max_bytes = text.trim().parse().ok().filter(|max_bytes| *max_bytes < NO_CEILING)?;
                Some(Self { max_bytes, counted: MemorySource::Cgroup { folder, names } })
            })
        });
        ceilings.min_by_key(|ceiling| ceiling.max_bytes)
    }

    fn used_bytes(&self) -> u64 {
        let of_cgroup = match &self.counted {
            MemorySource::Cgroup { folder, names } => names.used_bytes(folder),
            MemorySource::Process => None,
        };
        of_cgroup.unwrap_or_else(|| {
            let status = read(Path::new("/proc/self/status"));
            let kilobytes = ["RssAnon:", "RssShmem:"].map(|name| number_of(&status, name).unwrap_or(0));
            kilobytes.iter().sum::<u64>() * 1024
        })
    }
}

impl CgroupFiles {
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
