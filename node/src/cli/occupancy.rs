//! The lines of `fanfare sub --occupancy`: how many are at a channel.

use std::io::IsTerminal as _;

use fanfare_client::{ChannelOccupancy, Occupancy};
use serde::Serialize;

use super::output::printable;

pub(super) fn line(told: &ChannelOccupancy) -> String {
    if std::io::stdout().is_terminal() { readable(told) } else { json(told) }
}

/// The fields of the frame.
fn json(told: &ChannelOccupancy) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        channel: &'a str,
        occupancy: Occupancy,
        source: &'a str,
    }

    let source = if told.is_of_all { "cluster" } else { "node" };
    let line = Line { channel: &told.channel, occupancy: told.occupancy, source };
    serde_json::to_string(&line).expect("texts and numbers are JSON") + "\n"
}

/// Channel and counts.
fn readable(told: &ChannelOccupancy) -> String {
    let Occupancy { connections, publishers, subscribers, members } = told.occupancy;
    let of = if told.is_of_all { "" } else { " (of this node alone)" };
    format!(
        "{}  connections: {connections}, publishers: {publishers}, subscribers: {subscribers}, members: {members}{of}\n",
        printable(&told.channel)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_holds_the_counts_and_which_nodes_are_counted() {
        let occupancy = Occupancy { connections: 4, publishers: 3, subscribers: 2, members: 1 };
        let of_all = ChannelOccupancy { channel: "de\u{1b}mo".to_owned(), occupancy, is_of_all: true };
        let expected = concat!(
            r#"{"channel":"de\u001bmo","occupancy":{"connections":4,"publishers":3,"subscribers":2,"members":1},"#,
            r#""source":"cluster"}"#
        );
        assert_eq!(json(&of_all), format!("{expected}\n"));
        let counts = "de\\u{1b}mo  connections: 4, publishers: 3, subscribers: 2, members: 1";
        assert_eq!(readable(&of_all), format!("{counts}\n"));
        let of_one = ChannelOccupancy { is_of_all: false, ..of_all };
        assert!(json(&of_one).contains(r#""source":"node""#));
        assert_eq!(readable(&of_one), format!("{counts} (of this node alone)\n"));
    }
}
