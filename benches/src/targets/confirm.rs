//! Bare loop of a publisher to a broker: it waits for the confirmation of each message before it sends the next one of
//! its channel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueuePurgeOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::Result;

const QUEUE: &str = "bench-confirm-loop";
const WARM_UP: Duration = Duration::from_secs(2);
const PERSISTENT: u8 = 2;

#[derive(Args, Clone)]
pub struct Options {
    /// Address of the broker, with user, password and vhost.
    #[arg(long)]
    pub url: String,
    /// Number of messages under way at a time, each on an AMQP channel of its own.
    #[arg(long, default_value_t = 16)]
    pub channels: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Size of a message's body.
    #[arg(long, default_value_t = 400)]
    pub bytes: usize,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub confirmed_per_s: f64,
}

/// Publishes persistent messages to a durable queue, and prints the result as one JSON line.
pub fn print(options: &Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    println!("{}", serde_json::to_string(&runtime.block_on(run(options))?)?);
    Ok(())
}

async fn run(options: &Options) -> Result<Outcome> {
    let connection = Connection::connect(&options.url, ConnectionProperties::default()).await?;
    let declaring = connection.create_channel().await?;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    declaring.queue_declare(QUEUE.into(), durable, FieldTable::default()).await?;
    let confirmed = Arc::new(AtomicU64::new(0));
    let body: Arc<[u8]> = vec![b'x'; options.bytes].into();
    let mut loops = JoinSet::new();
    for _ in 0..options.channels {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        loops.spawn(publish(channel, Arc::clone(&body), Arc::clone(&confirmed)));
    }
    tokio::time::sleep(WARM_UP).await;
    let (before, began) = (confirmed.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    let count = confirmed.load(Ordering::Relaxed) - before;
    let confirmed_per_s = count as f64 / began.elapsed().as_secs_f64();
    if let Some(ended) = loops.try_join_next() {
        return Err(format!("a loop has ended: {ended:?}").into());
    }
    loops.shutdown().await;
    declaring.queue_purge(QUEUE.into(), QueuePurgeOptions::default()).await?;
    Ok(Outcome { confirmed_per_s })
}

/// Publishes until the channel fails.
async fn publish(channel: Channel, body: Arc<[u8]>, confirmed: Arc<AtomicU64>) -> Option<lapin::Error> {
    let properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    loop {
        let sent = channel.basic_publish("".into(), QUEUE.into(), options, &body, properties.clone()).await;
        let confirmation = match sent {
            Ok(confirmation) => confirmation.await,
            Err(error) => return Some(error),
        };
        if let Err(error) = confirmation {
            return Some(error);
        }
        confirmed.fetch_add(1, Ordering::Relaxed);
    }
}
