//! How far a long command is.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use super::output;
use crate::app::Progress;

/// Between two lines where nobody watches.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Between two changes of the line on a terminal.
const DRAW_EVERY: Duration = Duration::from_millis(200);
const BAR: usize = 30;

/// On stderr: one line that is drawn over on a terminal, else a line now and then.
pub(super) struct Telling {
    on_terminal: bool,
    begun: Instant,
    last: Option<Instant>,
    /// The latest, where it was not time for a line.
    untold: Option<String>,
}

impl Default for Telling {
    fn default() -> Self {
        Self { on_terminal: std::io::stderr().is_terminal(), begun: Instant::now(), last: None, untold: None }
    }
}

impl Telling {
    pub(super) fn hear(&mut self, progress: Progress) {
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
            output::tell(&text);
        } else {
            self.untold = Some(text);
            return;
        }
        (self.last, self.untold) = (Some(Instant::now()), None);
    }

    pub(super) fn end(self) {
        if self.on_terminal && self.last.is_some() {
            eprintln!();
        }
        if let Some(text) = self.untold {
            output::tell(&text);
        }
    }
}

fn line(Progress { rows, of, before }: Progress, since: Duration) -> String {
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
    fn a_line_tells_how_far_it_is() {
        let at =
            |rows, of, before, seconds| line(Progress { rows, of, before }, Duration::from_secs(seconds));
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
