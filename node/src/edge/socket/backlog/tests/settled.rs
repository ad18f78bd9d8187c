//! Start of a read over several nodes' rows, and the queries that wait for it.

use tokio::runtime::Handle;

use super::*;
use crate::cluster::routing::{KeptNodes, LocalNode, Routing};
use crate::edge::socket::Shards;
use crate::origin::history::{IncarnationPolicies, StoreError};
use crate::tasks::Tasks;
use crate::testing::{FakeStore, SharedLocal};

/// A retired incarnation.
const OTHER: u64 = 21;

/// Shared store in which incarnations have recorded these policies.
struct PoliciesFakeStore(Result<IncarnationPolicies, StoreError>);

impl FakeStore for PoliciesFakeStore {
    fn is_shared(&self) -> bool {
        self.0 != Err(StoreError::Off)
    }

    fn recent_policies(&self) -> Result<IncarnationPolicies, StoreError> {
        self.0.clone()
    }
}

/// A node without peers, whose pending writes settle a fixed number of times.
struct BacklogTestNode {
    backlog: Backlog,
    reader: BacklogReader,
    channel: Arc<Channel>,
}

impl BacklogTestNode {
    /// Creates the node. `kept` returns the recorded policies, from the node's own incarnation and its policies.
    fn new(settles: usize, kept: impl Fn(u64, u64) -> Result<IncarnationPolicies, StoreError>) -> Self {
        let (clock, limits) = (Clock::system(), Limits::default());
        let hub = Arc::new(Hub::new(Vec::new(), clock.clone(), &limits));
        let accounts = Accounts::from_text(DirectoryText::default().account("acme").text());
        let accounts = accounts.expect("a directory");
        let kept = kept(hub.incarnation(), accounts.current().history_policies());
        let store: Arc<dyn HistoryStore> = Arc::new(PoliciesFakeStore(kept));
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let routing = Routing::new(&hub, &"n1".into(), KeptNodes::default(), &tasks);
        routing.set_local(SharedLocal::new(settles, |_| None) as Arc<dyn LocalNode>);
        let publisher = Publisher::new(&hub, &store, &limits, Some(&routing));
        let (channel, _) = hub.attach(&key(), 0);
        let (backlog, reader) = Backlog::new(&publisher, &accounts, &clock, &[], &limits);
        Self { backlog, reader, channel }
    }

    async fn begins(&self, position: &Serial) -> bool {
        let rows = ChannelBacklog { shared: &self.backlog.shared, channel: &self.channel, oldest_ms: 0 };
        rows.settled_cursor(position.clone(), Serial::default()).await.is_some()
    }

    fn ask(&self, question: BacklogQuery, reply: BacklogResponder) {
        let policy = ChannelPolicy { history: true, retention_hours: 72 };
        self.backlog.ask(BacklogRequest { channel: Arc::clone(&self.channel), policy, question, reply });
    }
}

#[tokio::test]
async fn incarnations_must_all_have_kept_the_same_channels() {
    type KeptPolicies = fn(u64, u64) -> Result<IncarnationPolicies, StoreError>;
    let cases: [(usize, KeptPolicies, bool); 8] = [
        (1, |own, of| Ok(vec![(own, of)]), true),
        (1, |own, of| Ok(vec![(OTHER, of), (own, of), (OTHER + 1, of)]), true),
        (1, |own, of| Ok(vec![(OTHER, of + 1), (own, of)]), false),
        (1, |own, of| Ok(vec![(own, of), (own, of + 1)]), false),
        (1, |_, of| Ok(vec![(OTHER, of)]), false),
        (1, |_, _| Err(StoreError::Busy), false),
        (1, |_, _| Err(StoreError::Off), false),
        (0, |own, of| Ok(vec![(own, of)]), false),
    ];
    for (at, (settles, kept, begins)) in cases.into_iter().enumerate() {
        assert_eq!(BacklogTestNode::new(settles, kept).begins(&Serial::default()).await, begins, "case {at}");
    }
}

#[tokio::test]
async fn client_holding_messages_still_on_their_way_is_not_resumed() {
    let node = BacklogTestNode::new(9, |own, of| Ok(vec![(own, of)]));
    let own = node.backlog.shared.hub.incarnation();
    let here = node.channel.position().own.sequence;
    assert!(node.begins(&Serial::single(own, here)).await);
    assert!(!node.begins(&Serial::single(own, here + 1)).await);
    assert!(node.begins(&Serial::single(OTHER, 9)).await, "nobody has more of it");
}

#[tokio::test]
async fn reads_waiting_for_other_nodes_do_not_delay_local_reads() {
    let node = BacklogTestNode::new(0, |own, of| Ok(vec![(own, of)]));
    let (shards, _polls) = Shards::prepare(1).expect("a shard");
    let shard = shards.handle(0);
    let reply = |ticket| BacklogResponder::new(Arc::clone(&shard), 0, 0, ticket);
    for ticket in 0..2 * UNDER_WAY_MAX as u64 {
        let (position, attach_position) = (Serial::default(), Serial::default());
        node.ask(BacklogQuery::ClusterAfter { position, attach_position, back_ms: None }, reply(ticket));
    }
    let after = Stamp { incarnation: node.backlog.shared.hub.incarnation(), sequence: 0 };
    let last = 2 * UNDER_WAY_MAX as u64;
    node.ask(BacklogQuery::After { after, until_sequence: 0, back_ms: None }, reply(last));
    let BacklogTestNode { backlog: _open, reader, .. } = node;
    let begun = tokio::time::Instant::now();
    let mut first = Vec::new();
    let answered = async {
        while first.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            shard.inbox.take(&mut first);
        }
    };
    tokio::select! {
        () = reader.run() => unreachable!("the node runs"),
        () = answered => {}
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "after {:?}", begun.elapsed());
    assert!(matches!(first[..], [Input::BacklogResponse { ticket, .. }] if ticket == last));
}
