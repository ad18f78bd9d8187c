//! `fanfare pub`.

use std::time::Duration;

use clap::Args;
use fanfare_client::{Client, Draft, Error, Event, Handle};
use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::failure::{CommandOutcome, Failure};
use super::output;
use super::runtime::interruptible;
use super::target::NodeArguments;

/// The node's answer to more publishes than a socket may send.
const OVER_THE_LIMIT: u32 = 42_900;
const LIMIT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(super) struct PublishArguments {
    #[command(flatten)]
    node: NodeArguments,

    /// The event name
    #[arg(long)]
    name: Option<String>,

    /// The message id: published again under it within two minutes, the message is stored once
    #[arg(long)]
    id: Option<String>,

    /// The channel to publish to
    channel: String,

    /// JSON, or else a text; - publishes each line of stdin
    #[arg(allow_negative_numbers = true)]
    data: String,
}

/// Prints the serial of each message once it is acknowledged. Lines of stdin are also published across lost
/// connections.
pub(super) fn run(arguments: PublishArguments) -> Result<CommandOutcome, Failure> {
    if arguments.data == "-" && arguments.id.is_some() {
        return Err(Failure::usage("one --id cannot stand for many lines"));
    }
    let mut options = arguments.node.options()?;
    if arguments.data == "-" {
        options = options.reconnecting();
    }
    interruptible(async move {
        let mut client =
            Client::connect(options).await.map_err(|error| Failure::of_client("cannot connect", &error))?;
        let handle = client.handle();
        let outcome = tokio::select! {
            biased;
            outcome = publish_all(&handle, &arguments) => outcome?,
            failure = to_the_end(&mut client) => return Err(failure),
        };
        client.close().await.map_err(|error| Failure::because("published, but not closed", &error))?;
        Ok(outcome)
    })
}

/// Reports lost connections, until the client ends for good.
async fn to_the_end(client: &mut Client) -> Failure {
    while let Some(event) = client.next().await {
        if let Event::Ended(ending) = event {
            return Failure::failed(format!("not published: {}", output::printable(&ending.to_string())));
        }
        output::report_connection(&event);
    }
    Failure::failed("not published: the connection ended")
}

async fn publish_all(client: &Handle, arguments: &PublishArguments) -> Result<CommandOutcome, Failure> {
    if arguments.data != "-" {
        return publish(client, arguments, &arguments.data).await;
    }
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let unreadable = |error| Failure::because("cannot read stdin", &error);
    while let Some(line) = lines.next_line().await.map_err(unreadable)? {
        publish(client, arguments, &line).await?;
    }
    Ok(CommandOutcome::Done)
}

async fn publish(
    client: &Handle,
    arguments: &PublishArguments,
    data: &str,
) -> Result<CommandOutcome, Failure> {
    let draft = || Draft {
        id: arguments.id.as_deref().map(Into::into),
        name: arguments.name.as_deref().map(Into::into),
        data: Some(json(data)),
        ..Draft::default()
    };
    loop {
        match client.publish(&arguments.channel, vec![draft()]).await {
            Ok(serials) => {
                let serial = serials.into_iter().next().unwrap_or_else(|| "published".to_owned());
                return output::print(&format!("{serial}\n"));
            }
            Err(Error::Refused { code: OVER_THE_LIMIT, .. }) if arguments.data == "-" => {
                tokio::time::sleep(LIMIT_PAUSE).await;
            }
            Err(error) => return Err(Failure::because("not published", &error)),
        }
    }
}

/// The text itself when it is JSON, else a JSON string of it.
fn json(text: &str) -> Box<RawValue> {
    let given = serde_json::from_str(text.trim());
    given.unwrap_or_else(|_| serde_json::value::to_raw_value(text).expect("a string is JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publish_data_that_is_not_json_is_sent_as_text() {
        for (given, sent) in [
            ("1.0", "1.0"),
            (" {\"a\": 1} ", "{\"a\": 1}"),
            ("null", "null"),
            ("hello", "\"hello\""),
            (" hello ", "\" hello \""),
            ("{broken", "\"{broken\""),
            ("", "\"\""),
        ] {
            assert_eq!(json(given).get(), sent, "{given}");
        }
    }
}
