//! `fanfare sub`: follows channels over lost connections until it is interrupted or refused.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;

use clap::Args;
use fanfare_client::{Attach, Attached, Client, Delivery, Error, Event, MessageIn};
use serde::Serialize;
use serde_json::value::RawValue;

use super::failure::{CommandOutcome, Failure};
use super::occupancy;
use super::output::{self, printable, report, time_of_day};
use super::presence;
use super::runtime::interruptible;
use super::target::NodeArguments;

#[derive(Args)]
pub(super) struct SubscribeArguments {
    #[command(flatten)]
    node: NodeArguments,

    /// Begin with messages of the past: a number of them, or a time in seconds or minutes such as 10s or 5m
    #[arg(long, value_name = "HOW MUCH", value_parser = rewind)]
    rewind: Option<String>,

    /// Also print who is present, and who enters, changes and leaves
    #[arg(long)]
    presence: bool,

    /// Also print how many are at the channel: at once, and when that changes
    #[arg(long)]
    occupancy: bool,

    /// Channels to follow: one or more
    #[arg(required = true, value_name = "CHANNEL")]
    channels: Vec<String>,
}

/// Parses a rewind. The node decides how many messages it gives, and how far back.
fn rewind(text: &str) -> Result<String, String> {
    let number = text.strip_suffix(['s', 'm']).unwrap_or(text);
    if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(text.to_owned());
    }
    let allowed =
        "expected a number of messages such as 10, or a time in seconds or minutes such as 30s or 5m";
    let hours = text.strip_suffix('h').and_then(|hours| hours.parse::<u32>().ok());
    let minutes = hours.and_then(|hours| hours.checked_mul(60)).filter(|minutes| *minutes > 0);
    Err(minutes.map_or_else(|| allowed.to_owned(), |minutes| format!("{allowed}; {text} is {minutes}m")))
}

/// Prints a JSON object per message and line, or a readable line on a terminal. The state of channels goes to stderr.
pub(super) fn run(arguments: SubscribeArguments) -> Result<CommandOutcome, Failure> {
    let options = arguments.node.options()?.reconnecting();
    interruptible(async move {
        let client =
            Client::connect(options).await.map_err(|error| Failure::of_client("cannot follow", &error))?;
        let mut follower = Follower { client, following: BTreeSet::new() };
        follower.attach(&arguments).await?;
        follower.follow().await
    })
}

struct Follower {
    client: Client,
    following: BTreeSet<String>,
}

impl Follower {
    /// Attaches to the channels. A refused channel does not keep the others from being followed.
    async fn attach(&mut self, arguments: &SubscribeArguments) -> Result<(), Failure> {
        for channel in &arguments.channels {
            let modes = (!arguments.presence).then(|| vec!["subscribe".to_owned()]);
            let rewind = arguments.rewind.clone();
            let occupancy = arguments.occupancy;
            let attach = Attach { channel: channel.clone(), rewind, modes, occupancy, ..Attach::default() };
            let attached = match self.client.attach_with(attach).await {
                Ok(attached) => attached,
                Err(Error::Refused { code, error }) => {
                    report(&format!(
                        "not attached to {}: code {code}: {}",
                        printable(channel),
                        printable(&error)
                    ));
                    continue;
                }
                Err(error) => return Err(Failure::because("cannot follow", &error)),
            };
            report(&format!("attached to {}", printable(channel)));
            if let Some(warning) = attached.warning {
                report(&format!("{}: {}", printable(channel), printable(&warning)));
            }
            if arguments.presence && !attached.modes.iter().any(|mode| mode == "presence") {
                report(&format!("{}: the capability has no presence here", printable(channel)));
            } else if arguments.presence && !attached.presence {
                report(&format!("nobody is present on {}", printable(channel)));
            }
            self.following.insert(channel.clone());
        }
        self.check_following()
    }

    async fn follow(&mut self) -> Result<CommandOutcome, Failure> {
        while let Some(event) = self.client.next().await {
            let lines = match event {
                Event::Messages(delivery) => lines(&delivery),
                Event::Presence(presence) => presence::event_lines(&presence),
                Event::Members(members) => presence::member_lines(&members),
                Event::Occupancy(counts) => occupancy::line(&counts),
                Event::Ended(ending) => return Err(Failure::failed(printable(&ending.to_string()))),
                other => {
                    self.report_event(other)?;
                    continue;
                }
            };
            if !output::write(&lines)? {
                return Ok(CommandOutcome::Done);
            }
        }
        Err(Failure::failed("the connection ended"))
    }

    /// Reports events that have no line on stdout.
    fn report_event(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Attached(attached) => report(&continuity(&attached)),
            Event::Detached { channel, error, code } => {
                let (code, error) = (code.unwrap_or_default(), error.unwrap_or_default());
                report(&format!("detached from {}: code {code}: {}", printable(&channel), printable(&error)));
                self.following.remove(&channel);
                self.check_following()?;
            }
            Event::Error { code, error, channel } => {
                let channel = channel.map(|channel| printable(&channel)).unwrap_or_default();
                report(&format!("{channel}: code {code}: {}", printable(&error)));
            }
            other => output::report_connection(&other),
        }
        Ok(())
    }

    fn check_following(&self) -> Result<(), Failure> {
        if self.following.is_empty() {
            return Err(Failure::failed("no channel is left to follow"));
        }
        Ok(())
    }
}

fn continuity(attached: &Attached) -> String {
    let channel = printable(&attached.channel);
    if attached.resumed {
        format!("attached to {channel} again, nothing is missing (resumed: true)")
    } else {
        format!("attached to {channel} again, messages may be missing here (resumed: false)")
    }
}

fn lines(delivery: &Delivery) -> String {
    let line = if std::io::stdout().is_terminal() { readable_line } else { json_line };
    delivery.messages.iter().map(|message| line(&delivery.channel, message)).collect()
}

fn json_line(channel: &str, message: &MessageIn) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct MessageLine<'a> {
        channel: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        data: Option<&'a RawValue>,
        id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        extras: Option<&'a RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        client_id: Option<&'a str>,
        connection_id: &'a str,
        timestamp: u64,
    }

    let line = MessageLine {
        channel,
        name: message.name.as_deref(),
        data: message.data.as_deref(),
        id: &message.id,
        extras: message.extras.as_deref(),
        client_id: message.client_id.as_deref(),
        connection_id: &message.connection_id,
        timestamp: message.timestamp,
    };
    serde_json::to_string(&line).expect("texts and numbers are JSON") + "\n"
}

/// Time of day (UTC), channel, client, event name, data.
fn readable_line(channel: &str, message: &MessageIn) -> String {
    let mut parts = vec![time_of_day(message.timestamp), printable(channel)];
    parts.extend(message.client_id.as_deref().map(|id| format!("<{}>", printable(id))));
    parts.extend(message.name.as_deref().map(printable));
    parts.extend(message.data.as_ref().map(|data| printable(data.get())));
    parts.join("  ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> MessageIn {
        MessageIn {
            id: "i".into(),
            name: None,
            data: Some(RawValue::from_string("{\"n\":1.0}".to_owned()).expect("JSON")),
            extras: None,
            client_id: None,
            connection_id: "c_x".into(),
            timestamp: 86_400_000 + 3_723_004,
        }
    }

    #[test]
    fn rewind_takes_count_or_time_and_else_names_valid_forms() {
        for good in ["1", "100", "10s", "5m", "00m"] {
            assert_eq!(rewind(good).as_deref(), Ok(good));
        }
        for bad in ["", "s", "much", "-1", "1.5m", "1d", "1 s", "h", "0h"] {
            assert!(rewind(bad).expect_err(bad).ends_with("such as 30s or 5m"), "{bad}");
        }
        assert!(rewind("2h").expect_err("hours").ends_with("30s or 5m; 2h is 120m"));
    }

    #[test]
    fn a_line_holds_what_the_message_holds() {
        let line =
            r#"{"channel":"demo","data":{"n":1.0},"id":"i","connectionId":"c_x","timestamp":90123004}"#;
        assert_eq!(json_line("demo", &message()), format!("{line}\n"));
        assert_eq!(readable_line("demo", &message()), "01:02:03.004  demo  {\"n\":1.0}\n");
        let named =
            MessageIn { name: Some("greeting".into()), client_id: Some("an\u{1b}n".into()), ..message() };
        assert_eq!(
            readable_line("demo", &named),
            "01:02:03.004  demo  <an\\u{1b}n>  greeting  {\"n\":1.0}\n"
        );
    }
}
