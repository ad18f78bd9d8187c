//! Writing to stdout. A reader that goes away, as in `fanfare sub demo | head -1`, ends a command without a failure.

use std::io::{self, ErrorKind, Write as _};
use std::time::Duration;

use fanfare_client::Event;

use super::failure::{CommandOutcome, Failure};
use crate::tasks;

/// Time for which a node or a command waits for a reader before it goes on without.
pub(super) const READ_WITHIN: Duration = Duration::from_secs(1);

/// Writes `text` as it is.
pub(super) fn print(text: &str) -> Result<CommandOutcome, Failure> {
    write(text).map(|_| CommandOutcome::Done)
}

/// Writes `text`; false if the reader has gone.
pub(super) fn write(text: &str) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::because("cannot write to stdout", &error)),
    }
}

/// Writes a line to stderr, so that stdout has only the requested output.
pub(super) fn report(text: &str) {
    // Unlike `eprintln!`, this does not panic when the reader has gone.
    writeln!(io::stderr(), "fanfare: {text}").ok();
}

/// Writes several lines to stderr, with a bounded wait for the reader.
pub(super) fn report_all(lines: Vec<String>) {
    tasks::at_most(READ_WITHIN, move || lines.iter().for_each(|line| report(line))).ok();
}

/// Reports a lost or restored connection; ignores other events.
pub(super) fn report_connection(event: &Event) {
    match event {
        Event::Disconnected { ending, retry_in } => {
            let ending = printable(&ending.to_string());
            report(&format!("the connection is lost, trying again in {} ms: {ending}", retry_in.as_millis()));
        }
        Event::Connected(_) => report("connected again"),
        _ => {}
    }
}

/// Shows what could move the cursor or hide text as `\u{…}`.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        let turns_direction =
            matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || turns_direction {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Time of day in UTC, with milliseconds.
pub(super) fn time_of_day(timestamp_ms: u64) -> String {
    let seconds = timestamp_ms / 1000;
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{:03}", seconds % 60, timestamp_ms % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_controls_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jé\u{9b}\n\u{202e}"), "a\\u{1b}[2Jé\\u{9b}\\u{a}\\u{202e}");
    }
}
