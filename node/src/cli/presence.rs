//! Output of `fanfare sub --presence`: present members, and who enters, changes and leaves.

use std::io::IsTerminal as _;

use fanfare_client::{Members, Presence};
use serde::Serialize;
use serde_json::value::RawValue;

use super::output::{printable, time_of_day};

/// One event, or one member of the list, which is printed as `present`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PresenceLine<'a> {
    channel: &'a str,
    action: &'a str,
    client_id: &'a str,
    connection_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a RawValue>,
    timestamp: u64,
}

pub(super) fn event_lines(presence: &Presence) -> String {
    let line = |event: &fanfare_client::PresenceIn| {
        text(&PresenceLine {
            channel: &presence.channel,
            action: &event.action,
            client_id: &event.client_id,
            connection_id: &event.connection_id,
            data: event.data.as_deref(),
            timestamp: event.timestamp,
        })
    };
    presence.events.iter().map(line).collect()
}

pub(super) fn member_lines(members: &Members) -> String {
    let line = |member: &fanfare_client::MemberIn| {
        text(&PresenceLine {
            channel: &members.channel,
            action: "present",
            client_id: &member.client_id,
            connection_id: &member.connection_id,
            data: member.data.as_deref(),
            timestamp: member.timestamp,
        })
    };
    members.members.iter().map(line).collect()
}

fn text(line: &PresenceLine<'_>) -> String {
    if std::io::stdout().is_terminal() { readable(line) } else { json(line) }
}

fn json(line: &PresenceLine<'_>) -> String {
    serde_json::to_string(line).expect("texts and numbers are JSON") + "\n"
}

/// Time of day (UTC), channel, client, action, data.
fn readable(line: &PresenceLine<'_>) -> String {
    let mut parts = vec![time_of_day(line.timestamp), printable(line.channel)];
    parts.push(format!("<{}>", printable(line.client_id)));
    parts.push(format!("({})", printable(line.action)));
    parts.extend(line.data.map(|data| printable(data.get())));
    parts.join("  ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_holds_what_the_event_holds() {
        let data = RawValue::from_string("1.0".to_owned()).expect("JSON");
        let line = PresenceLine {
            channel: "demo",
            action: "enter",
            client_id: "an\u{1b}n",
            connection_id: "c_x",
            data: Some(&data),
            timestamp: 86_400_000 + 3_723_004,
        };
        let expected = concat!(
            r#"{"channel":"demo","action":"enter","clientId":"an\u001bn","connectionId":"c_x","#,
            r#""data":1.0,"timestamp":90123004}"#
        );
        assert_eq!(json(&line), format!("{expected}\n"));
        assert_eq!(readable(&line), "01:02:03.004  demo  <an\\u{1b}n>  (enter)  1.0\n");
        let bare = PresenceLine { data: None, action: "leave", ..line };
        assert_eq!(readable(&bare), "01:02:03.004  demo  <an\\u{1b}n>  (leave)\n");
    }
}
