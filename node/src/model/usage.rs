//! Usage of an account, counted by the parts that serve it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Kinds of metric rows; `bytes` is 0 unless stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UsageKind {
    /// Messages acknowledged, and their sizes. A repeated id is not counted again.
    Publish,
    /// Messages handed to a socket, and their sizes: a message counts once for each subscriber.
    Deliver,
    /// Presence events accepted, and the sizes of their data.
    Presence,
    /// Sockets opened.
    Connect,
    /// Authenticated HTTP requests, whatever became of them.
    Api,
    /// Tokens issued.
    Token,
    /// Pages of history read, and the sizes of the answers.
    HistoryRead,
    /// Events that webhooks received, and the bytes of their envelopes; and those of failed attempts.
    Webhook,
    WebhookFailed,
    /// Events that AMQP targets received, and the bytes of their envelopes; and those of failed attempts.
    Amqp,
    AmqpFailed,
    /// Events that Lambda functions received, and the bytes of their envelopes; and those of failed attempts.
    Lambda,
    LambdaFailed,
    /// Events that SNS topics received, and the bytes of their envelopes; and those of failed attempts.
    Sns,
    SnsFailed,
    /// Events that queues received, and the bytes of their envelopes; and those of failed attempts.
    Queue,
    QueueFailed,
}

impl UsageKind {
    pub const ALL: [Self; 17] = [
        Self::Publish,
        Self::Deliver,
        Self::Presence,
        Self::Connect,
        Self::Api,
        Self::Token,
        Self::HistoryRead,
        Self::Webhook,
        Self::WebhookFailed,
        Self::Amqp,
        Self::AmqpFailed,
        Self::Lambda,
        Self::LambdaFailed,
        Self::Sns,
        Self::SnsFailed,
        Self::Queue,
        Self::QueueFailed,
    ];

    /// The name for clients and stores.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Deliver => "deliver",
            Self::Presence => "presence",
            Self::Connect => "connect",
            Self::Api => "api",
            Self::Token => "token",
            Self::HistoryRead => "history-read",
            Self::Webhook => "webhook",
            Self::WebhookFailed => "webhook-failed",
            Self::Amqp => "amqp",
            Self::AmqpFailed => "amqp-failed",
            Self::Lambda => "lambda",
            Self::LambdaFailed => "lambda-failed",
            Self::Sns => "sns",
            Self::SnsFailed => "sns-failed",
            Self::Queue => "queue",
            Self::QueueFailed => "queue-failed",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    pub count: u64,
    pub bytes: u64,
}

impl Amount {
    pub fn add(&mut self, more: Self) {
        self.count = self.count.saturating_add(more.count);
        self.bytes = self.bytes.saturating_add(more.bytes);
    }
}

/// Counters of one account: shared by all parts that serve it, and emptied by the meter every few seconds.
#[derive(Debug, Default)]
pub struct Usage {
    counters: [UsageCounter; UsageKind::ALL.len()],
}

/// A counter on its own cache line, so that publishers and shards do not contend.
#[derive(Debug, Default)]
#[repr(align(64))]
struct UsageCounter {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Usage {
    /// Adds to a counter, at the cost of two additions. To be called before the effect is visible from outside.
    pub fn count(&self, kind: UsageKind, count: u64, bytes: u64) {
        let counter = &self.counters[kind as usize];
        counter.count.fetch_add(count, Ordering::Relaxed);
        if bytes > 0 {
            counter.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Takes the amount since the last call; `None` if nothing was counted.
    pub fn take(&self, kind: UsageKind) -> Option<Amount> {
        let counter = &self.counters[kind as usize];
        let taken = |cell: &AtomicU64| match cell.load(Ordering::Relaxed) {
            0 => 0,
            _ => cell.swap(0, Ordering::Relaxed),
        };
        let amount = Amount { count: taken(&counter.count), bytes: taken(&counter.bytes) };
        (amount != Amount::default()).then_some(amount)
    }

    /// Whether nothing was counted since the last `take` of each kind.
    pub fn is_empty(&self) -> bool {
        let is_zero = |cell: &AtomicU64| cell.load(Ordering::Relaxed) == 0;
        self.counters.iter().all(|counter| is_zero(&counter.count) && is_zero(&counter.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counted_by_many_threads_is_taken_once() {
        let usage = Usage::default();
        let mut taken = Amount::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| usage.count(UsageKind::Deliver, 2, 3)));
            }
            for _ in 0..1_000 {
                usage.take(UsageKind::Deliver).into_iter().for_each(|amount| taken.add(amount));
            }
        });
        usage.take(UsageKind::Deliver).into_iter().for_each(|amount| taken.add(amount));
        assert_eq!(taken, Amount { count: 80_000, bytes: 120_000 });
        assert_eq!(usage.take(UsageKind::Deliver), None);
        assert!(usage.is_empty());
    }

    #[test]
    fn kinds_have_names_of_their_own() {
        for kind in UsageKind::ALL {
            assert_eq!(UsageKind::parse(kind.as_str()), Some(kind));
            let usage = Usage::default();
            usage.count(kind, 1, 0);
            let counted = UsageKind::ALL.into_iter().filter(|kind| usage.take(*kind).is_some());
            assert_eq!(counted.collect::<Vec<_>>(), [kind]);
        }
        assert_eq!(UsageKind::parse("other"), None);
    }
}
