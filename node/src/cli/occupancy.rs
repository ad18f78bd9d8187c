//! Output of `fanfare sub --occupancy`: the counts of a channel.

use std::io::IsTerminal as _;

use fanfare_client::{ChannelOccupancy, Occupancy};
use serde::Serialize;

use super::output::printable;

pub(super) fn line(counts: &ChannelOccupancy) -> String {
    if std::io::stdout().is_terminal() { readable(counts) } else { json(counts) }
}

/// The fields of the frame.
fn json(counts: &ChannelOccupancy) -> String {
    #[derive(Serialize)]
    struct OccupancyLine<'a> {
        channel: &'a str,
        occupancy: Occupancy,
        source: &'a str,
    }

    let source = if counts.is_of_all { "cluster" } else { "node" };
    let line = OccupancyLine { channel: &counts.channel, occupancy: counts.occupancy, source };
    serde_json::to_string(&line).expect("texts and numbers are JSON") + "\n"
}

/// Channel and counts.
fn readable(counts: &ChannelOccupancy) -> String {
    let Occupancy { connections, publishers, subscribers, members } = counts.occupancy;
    let of = if counts.is_of_all { "" } else { " (of this node alone)" };
    format!(
        "{}  connections: {connections}, publishers: {publishers}, subscribers: {subscribers}, members: {members}{of}\n",
        printable(&counts.channel)
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
