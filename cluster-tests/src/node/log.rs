//! The log lines of a node.

use std::io::{BufRead as _, BufReader, PipeReader};
use std::process::ChildStderr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Number of lines of a node's log that are kept, the last ones.
const LOG_LINES_MAX: usize = 2000;

/// Log lines of a node over all its starts.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    last: std::collections::VecDeque<String>,
    panicked: bool,
    /// Number of processes that may still write.
    followed: usize,
    unread: Vec<PipeReader>,
}

impl Log {
    pub(super) fn follow(&self, stderr: ChildStderr) {
        let log = self.clone();
        self.lines().followed += 1;
        thread::spawn(move || {
            let mut reader = BufReader::new(stderr);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                log.push(String::from_utf8_lossy(&line).trim_end().into());
                line.clear();
            }
            log.lines().followed -= 1;
        });
    }

    pub(super) fn hold(&self, unread: PipeReader) {
        self.lines().unread.push(unread);
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: String) {
        let mut lines = self.lines();
        lines.panicked |= line.contains("panicked");
        if lines.last.len() == LOG_LINES_MAX {
            lines.last.pop_front();
        }
        lines.last.push_back(line);
    }

    pub(super) fn text(&self) -> String {
        self.lines().last.iter().map(|line| format!("{line}\n")).collect()
    }

    pub(super) fn is_whole(&self) -> bool {
        self.lines().followed == 0
    }

    pub(super) fn panicked(&self) -> bool {
        self.lines().panicked
    }
}
