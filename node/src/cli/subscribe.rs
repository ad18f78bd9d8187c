//! `fanfare sub`: follows channels over lost connections until it is interrupted or refused.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use fanfare_client::{Client, Delivery, Ending, Error, Event, MessageIn, Options};
use fanfare_proto::frame::Attach;
use serde::Serialize;
use serde_json::value::RawValue;

use super::failure::{Failure, Outcome};
use super::output::{self, printable, time_of_day};
use super::presence;
use super::runtime::interruptible;
use super::target::NodeArguments;

const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// Close codes from here on refuse the credential; 4008, a slow consumer, may come back.
const REFUSALS: std::ops::Range<u16> = 4001..4008;

#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    /// Begin with messages of the past: a number of them, or a time such as 10s or 5m
    #[arg(long, value_name = "HOW MUCH")]
    rewind: Option<String>,

    /// Also print who is present, and who enters, changes and leaves
    #[arg(long)]
    presence: bool,

    #[arg(required = true, value_name = "CHANNEL")]
    channels: Vec<String>,
}

/// Prints a JSON object per message and line, or on a terminal a line to read.
pub(super) fn run(arguments: Arguments) -> Result<Outcome, Failure> {
    let options = arguments.node.options()?;
    let follower = Follower { options, arguments, serials: HashMap::new() };
    interruptible(follower.run())
}

struct Follower {
    options: Options,
    arguments: Arguments,
    /// Up to where each channel has been printed.
    serials: HashMap<String, String>,
}

/// Why one connection's following is over.
enum End {
    /// Nobody reads stdout any more.
    Unread,
    Lost {
        reason: String,
        pause: Duration,
    },
}

impl Follower {
    async fn run(mut self) -> Result<Outcome, Failure> {
        let mut client = self.connect().await.map_err(|error| Failure::of_client("cannot follow", &error))?;
        loop {
            let (reason, pause) = match self.follow(&mut client).await? {
                End::Unread => return Ok(Outcome::Done),
                End::Lost { reason, pause } => (reason, pause),
            };
            eprintln!("fanfare: the connection is lost, trying again: {reason}");
            // The node waits for its clients to go before it ends.
            drop(client);
            client = self.reconnect(pause).await?;
        }
    }

    async fn connect(&mut self) -> Result<Client, Error> {
        let client = Client::connect(self.options.clone()).await?;
        for channel in &self.arguments.channels {
            let serial = self.serials.get(channel).cloned();
            let rewind = self.arguments.rewind.clone().filter(|_| serial.is_none());
            let resuming = serial.is_some();
            let modes = (!self.arguments.presence).then(|| vec!["subscribe".to_owned()]);
            let attach = Attach { channel: channel.clone(), rewind, serial, modes };
            let attached = client.attach_with(attach).await?;
            if resuming && !attached.resumed {
                eprintln!("fanfare: messages of {} may be missing here", printable(channel));
            }
            if let Some(warning) = attached.warning {
                eprintln!("fanfare: {}: {}", printable(channel), printable(&warning));
            }
            self.serials.entry(channel.clone()).or_insert(attached.serial);
        }
        Ok(client)
    }

    async fn reconnect(&mut self, pause: Duration) -> Result<Client, Failure> {
        tokio::time::sleep(pause).await;
        loop {
            match self.connect().await {
                Ok(client) => return Ok(client),
                Err(error) if is_final(&error) => return Err(Failure::because("cannot follow", &error)),
                Err(_) => tokio::time::sleep(RECONNECT_PAUSE).await,
            }
        }
    }

    async fn follow(&mut self, client: &mut Client) -> Result<End, Failure> {
        let mut pause = RECONNECT_PAUSE;
        loop {
            match client.next().await {
                Some(Event::Messages(delivery)) => {
                    if !output::write(&lines(&delivery))? {
                        return Ok(End::Unread);
                    }
                    self.serials.insert(delivery.channel, delivery.serial);
                }
                Some(Event::Presence(presence)) => {
                    if !output::write(&presence::event_lines(&presence))? {
                        return Ok(End::Unread);
                    }
                }
                Some(Event::Members(members)) => {
                    if !output::write(&presence::member_lines(&members))? {
                        return Ok(End::Unread);
                    }
                }
                Some(Event::Attached(attached)) => {
                    if !attached.resumed {
                        eprintln!(
                            "fanfare: messages of {} may be missing here",
                            printable(&attached.channel)
                        );
                    }
                    self.serials.insert(attached.channel, attached.serial);
                }
                Some(Event::Disconnected { reconnect_after_ms, .. }) => {
                    pause = Duration::from_millis(reconnect_after_ms);
                }
                Some(Event::Detached { channel, error, .. }) => {
                    let error = error.unwrap_or_default();
                    return Err(Failure::failed(format!("{} was detached: {error}", printable(&channel))));
                }
                Some(Event::Error { error, code, .. }) => {
                    return Err(Failure::failed(format!("refused with code {code}: {error}")));
                }
                Some(Event::Ended(ending)) => return lost(ending, pause),
                Some(Event::Connected(_) | Event::AuthRequired { .. }) => {}
                None => return lost(Ending::Lost("it ended".to_owned()), pause),
            }
        }
    }
}

fn lost(ending: Ending, pause: Duration) -> Result<End, Failure> {
    let reason = match ending {
        Ending::Closed { code, reason } if REFUSALS.contains(&code) => {
            return Err(Failure::failed(format!("closed with code {code}: {}", printable(&reason))));
        }
        Ending::Closed { code, reason } => {
            format!("closed with code {code} {}", printable(&reason)).trim_end().to_owned()
        }
        Ending::Silent => "nothing was heard".to_owned(),
        Ending::Lost(reason) => reason,
    };
    Ok(End::Lost { reason, pause })
}

/// Whether trying again unchanged would end the same.
fn is_final(error: &Error) -> bool {
    match error {
        Error::Http { status, .. } => (400..500).contains(status) && *status != 429,
        Error::Refused { code, .. } => (40_000..42_900).contains(code),
        Error::BadUrl(_) | Error::BadKey | Error::BadValue(_) => true,
        Error::Io(_) | Error::TimedOut | Error::Closed | Error::Protocol(_) => false,
    }
}

fn lines(delivery: &Delivery) -> String {
    let line = if std::io::stdout().is_terminal() { readable_line } else { json_line };
    delivery.messages.iter().map(|message| line(&delivery.channel, message)).collect()
}

fn json_line(channel: &str, message: &MessageIn) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Line<'a> {
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

    let line = Line {
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

/// Time of day (UTC), channel, who, event name, data.
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

    #[test]
    fn a_refusal_ends_the_following_and_a_loss_does_not() {
        let closed = |code| lost(Ending::Closed { code, reason: String::new() }, RECONNECT_PAUSE);
        assert!(closed(4001).is_err() && closed(4003).is_err());
        assert!(closed(1001).is_ok() && closed(1012).is_ok() && closed(4008).is_ok());
        assert!(is_final(&Error::Http { status: 401, error: String::new(), reason: None }));
        assert!(!is_final(&Error::Http { status: 429, error: String::new(), reason: None }));
        assert!(!is_final(&Error::Http { status: 503, error: String::new(), reason: None }));
        assert!(is_final(&Error::Refused { code: 40_160, error: String::new() }));
        assert!(!is_final(&Error::Refused { code: 50_003, error: String::new() }));
    }
}
