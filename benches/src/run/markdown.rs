//! Markdown tables, in the form of the pages with the figures.

use std::fmt::Write as _;

use super::bars::Bar;

pub(super) struct Table {
    text: String,
    columns: usize,
}

impl Table {
    pub(super) fn new(title: &str, columns: &[&str]) -> Self {
        let rule = "---|".repeat(columns.len() + 1);
        Self { text: format!("| {title} | {} |\n|{rule}\n", columns.join(" | ")), columns: columns.len() }
    }

    /// Adds a row. A row without runs has no figures.
    pub(super) fn row(&mut self, name: &str, runs: usize, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns, "a cell for each column");
        let cells = if runs == 0 { vec!["–".to_owned(); self.columns] } else { cells };
        let _ = writeln!(self.text, "| {name} | {} |", cells.join(" | "));
    }

    /// Gives the table with an empty line after it.
    pub(super) fn text(self) -> String {
        self.text + "\n"
    }
}

pub(super) fn bar_table(bars: &[Bar]) -> String {
    if bars.is_empty() {
        return String::new();
    }
    let mut text = "| bar | at least, at most | measured | ÷ the bar | |\n|---|---|---|---|---|\n".to_owned();
    for Bar { what, measured, bar, of_bar, met, not_judged } in bars {
        let verdict = match not_judged {
            Some(reason) => format!("not judged: {reason}"),
            None => if *met { "met" } else { "**missed**" }.to_owned(),
        };
        let of_bar = if of_bar.is_finite() { format!("{of_bar:.2}") } else { "–".to_owned() };
        let _ = writeln!(text, "| {what} | {bar} | {measured} | {of_bar} | {verdict} |");
    }
    text + "\n"
}

pub(super) fn failed(failures: &[String]) -> String {
    failures.iter().map(|failure| format!("- FAILED {failure}\n")).collect()
}

pub(super) fn pair(one: f64, other: f64) -> String {
    format!("{one:.2} / {other:.2}")
}
