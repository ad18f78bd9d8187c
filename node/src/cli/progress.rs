//! Progress reports of a long command.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use super::output;
use crate::app::CopyProgress;

/// Interval of lines when stderr is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Interval of changes of the line on a terminal.
const DRAW_EVERY: Duration = Duration::from_millis(200);
const BAR: usize = 30;

/// Progress on stderr: one line that is redrawn on a terminal, else a line now and then.
pub(super) struct ProgressReporter {
    on_terminal: bool,
    begun: Instant,
    last: Option<Instant>,
    /// Latest progress that has not been written yet.
    pending: Option<String>,
}

impl Default for ProgressReporter {
    fn default() -> Self {
        Self {
            on_terminal: std::io::stderr().is_terminal(),
            begun: Instant::now(),
            last: None,
            pending: None,
        }
    }
}

impl ProgressReporter {
    pub(super) fn report(&mut self, progress: CopyProgress) {
        if self.last.is_none() {
            self.begun = Instant::now();
        }
        let since = self.last.map(|last| last.elapsed());
        if self.on_terminal && since.is_some_and(|since| since < DRAW_EVERY) {
            return;
        }
        let text = line(progress, self.begun.elapsed());
        if self.on_terminal {
            eprint!("\r{text}\u{1b}[K");
        } else if since.is_none_or(|since| since >= LINE_EVERY) {
            output::report(&text);
        } else {
            self.pending = Some(text);
            return;
        }
        (self.last, self.pending) = (Some(Instant::now()), None);
    }

    pub(super) fn end(self) {
        if self.on_terminal && self.last.is_some() {
            eprintln!();
        }
        if let Some(text) = self.pending {
            output::report(&text);
        }
    }
}

fn line(CopyProgress { rows, of, before }: CopyProgress, since: Duration) -> String {
    let of = of.max(rows);
    let share = if of == 0 { 1.0 } else { rows as f64 / of as f64 };
    let filled = (share * BAR as f64) as usize;
    let rate = (rows - before) as f64 / since.as_secs_f64().max(1.0);
    let left = if rate > 0.0 && rows < of {
        format!(", {} left", span((of - rows) as f64 / rate))
    } else {
        String::new()
    };
    format!(
        "[{}{}] {:3.0} %, {rows} of about {of} rows, {rate:.0}/s{left}",
        "#".repeat(filled),
        " ".repeat(BAR - filled.min(BAR)),
        100.0 * share
    )
}

fn span(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ 0..=99 => format!("{seconds} s"),
        seconds @ 100..=5_999 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_line_shows_rows_rate_and_time_left() {
        let at =
            |rows, of, before, seconds| line(CopyProgress { rows, of, before }, Duration::from_secs(seconds));
        assert_eq!(
            at(3_000, 12_000, 1_000, 10),
            "[#######                       ]  25 %, 3000 of about 12000 rows, 200/s, 45 s left"
        );
        assert_eq!(at(0, 0, 0, 0), format!("[{}] 100 %, 0 of about 0 rows, 0/s", "#".repeat(30)));
        assert!(at(20, 10, 0, 1).contains("100 %, 20 of about 20 rows"), "an estimate may be low");
        assert!(at(1, 100_000, 0, 1).ends_with("27 h left"));
        assert!(at(100, 100_000, 0, 1).ends_with("16 min left"));
    }
}
