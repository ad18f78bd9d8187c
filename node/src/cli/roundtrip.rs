//! `fanfare roundtrip`: checks that a message published through one node is received through each.

use std::time::{Duration, Instant};

use clap::Args;
use fanfare_client::{Client, Draft, Event, Options};
use serde_json::value::RawValue;

use super::failure::{CommandOutcome, Failure};
use super::output;
use super::runtime::interruptible;
use super::target::NodeArguments;
use crate::model::random_bytes;

/// Time limit from the publish to the last delivery.
const WITHIN: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct RoundtripArguments {
    #[command(flatten)]
    node: NodeArguments,

    /// Connect there in place of the host of --url, which the certificate and the request still name; repeated for several nodes
    #[arg(long, value_name = "HOST:PORT")]
    through: Vec<String>,

    /// The channel to publish to; the key must be allowed to subscribe as well
    channel: String,
}

/// A connection, with its name for the output.
struct RoundtripClient {
    name: String,
    client: Client,
}

/// Prints for each pair of nodes how long a message took.
pub(super) fn run(arguments: RoundtripArguments) -> Result<CommandOutcome, Failure> {
    let options = arguments.node.options()?;
    interruptible(async move {
        let mut ways = open(options, &arguments).await?;
        for number in 0..ways.len() {
            let lines = publish(&mut ways, number, &arguments.channel).await?;
            output::print(&lines)?;
        }
        for way in ways {
            way.client.close().await.map_err(|error| Failure::because(&way.name, &error))?;
        }
        Ok(CommandOutcome::Done)
    })
}

/// Opens and attaches a connection through each node.
async fn open(options: Options, arguments: &RoundtripArguments) -> Result<Vec<RoundtripClient>, Failure> {
    let through: Vec<_> = arguments.through.iter().cloned().map(Some).collect();
    let mut ways = Vec::new();
    for connect_to in if through.is_empty() { vec![None] } else { through } {
        let name = connect_to.clone().unwrap_or_else(|| options.url.clone());
        let client = Client::connect(Options { connect_to, ..options.clone() }).await;
        let client = client.map_err(|error| Failure::of_client(&name, &error))?;
        client.attach(&arguments.channel).await.map_err(|error| Failure::because(&name, &error))?;
        ways.push(RoundtripClient { name, client });
    }
    Ok(ways)
}

/// Publishes through one node and waits for the message on each; returns a line for each.
async fn publish(ways: &mut [RoundtripClient], number: usize, channel: &str) -> Result<String, Failure> {
    let id = format!("roundtrip-{:032x}", u128::from_be_bytes(random_bytes()));
    let draft = Draft {
        id: Some(id.as_str().into()),
        name: Some("roundtrip".into()),
        data: RawValue::from_string(number.to_string()).ok(),
        ..Draft::default()
    };
    let (from, begun) = (ways[number].name.clone(), Instant::now());
    let published = ways[number].client.publish(channel, vec![draft]).await;
    published.map_err(|error| Failure::because(&format!("{from}: not published"), &error))?;
    let acked = begun.elapsed();
    let mut lines = format!("published through {from}: acknowledged after {}\n", milliseconds(acked));
    for way in ways {
        let left = WITHIN.saturating_sub(begun.elapsed());
        let received = tokio::time::timeout(left, until_received(&mut way.client, &id)).await;
        received.map_err(|_| {
            Failure::failed(format!(
                "published through {from}: not received through {} within {WITHIN:?}",
                way.name
            ))
        })??;
        lines.push_str(&format!("  received through {} after {}\n", way.name, milliseconds(begun.elapsed())));
    }
    Ok(lines)
}

async fn until_received(client: &mut Client, id: &str) -> Result<(), Failure> {
    while let Some(event) = client.next().await {
        match event {
            Event::Messages(delivery) if delivery.messages.iter().any(|message| message.id == id) => {
                return Ok(());
            }
            Event::Ended(ending) => return Err(Failure::failed(output::printable(&ending.to_string()))),
            _ => {}
        }
    }
    Err(Failure::failed("the connection ended"))
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}
