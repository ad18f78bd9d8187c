//! Requests between nodes: a request has a number, which its answers carry, too.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::inbound::{PeerAnswer, PeerRequest};
use super::super::link::PeerItem;
use super::{KeptNodes, Routing, StoreBackfillQuery};
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ClaimedNonce, ClientId, ForwardedParts, IdScope, IncarnationStatus,
    Nonce, NoncePage, Revocation, Stamp, StampedIds,
};
use crate::tasks::OnStop;

/// Most requests of peers that are answered at a time, besides backfills; further ones get no answer. Every `IDS_OF_A_REQUEST` ids or
/// channels count as one more request.
pub(super) const LOCAL_MAX: usize = 16_384;
const IDS_OF_A_REQUEST: usize = 16;
/// Time after which no node awaits an answer any more.
const LOCAL_WAIT: Duration = Duration::from_secs(5);

/// Most answers that are kept for nodes without a link, in all.
const EARLY_MAX: usize = 1_024;
const EARLY_BYTES_MAX: usize = 1 << 20;

/// Weight of a request, as a number of plain requests.
fn weight(request: &PeerRequest) -> usize {
    match request {
        PeerRequest::ClaimIds(ids) => {
            1 + ids.iter().map(|given| given.ids.len()).sum::<usize>() / IDS_OF_A_REQUEST
        }
        PeerRequest::Attached(keys) => 1 + keys.len() / IDS_OF_A_REQUEST,
        _ => 1,
    }
}

/// Answers to nodes that linked to this node before gossip reported them, oldest first.
#[derive(Default)]
pub(super) struct EarlyAnswers(VecDeque<(Instant, u64, PeerItem)>);

impl EarlyAnswers {
    fn keep(&mut self, to: u64, answer: PeerItem, now: Instant) {
        let is_late = |since: Instant| now.saturating_duration_since(since) >= LOCAL_WAIT;
        while self.0.front().is_some_and(|(since, ..)| is_late(*since)) {
            self.0.pop_front();
        }
        let bytes: usize = self.0.iter().map(|(_, _, item)| item.bytes()).sum();
        if self.0.len() < EARLY_MAX && bytes + answer.bytes() <= EARLY_BYTES_MAX {
            self.0.push_back((now, to, answer));
        }
    }

    fn take(&mut self, linked: impl Fn(u64) -> bool) -> Vec<(u64, PeerItem)> {
        let (of_linked, others) = std::mem::take(&mut self.0).into_iter().partition(|(_, to, _)| linked(*to));
        self.0 = others;
        of_linked.into_iter().map(|(_, to, answer): (Instant, _, _)| (to, answer)).collect()
    }
}

/// Services of a node that peers may request: connections, nonces, message ids, revocations and the store.
pub trait LocalNode: Send + Sync + 'static {
    /// Closes every connection of the account with this client id here, and returns their number. None while the node stops.
    fn close_client(&self, account: AccountId, client_id: ClientId) -> NodeFuture<Option<u64>>;

    /// Number of connections here. None while the node accepts no further ones.
    fn connections(&self) -> Option<u64>;

    /// Counts the connections that are attached to each of these channels. None while the node stops.
    fn attached(&self, keys: Vec<ChannelKey>) -> NodeFuture<Option<Vec<AttachedCount>>>;

    /// Time of the clock by which credentials are checked, in milliseconds since the Unix epoch.
    fn now_ms(&self) -> u64;

    /// Claims a nonce at this node. False if the nonce was remembered here before, None if it cannot be stored.
    fn claim_nonce(&self, nonce: Nonce) -> NodeFuture<Option<bool>>;

    /// One page of the nonces that are remembered here, from the cursor `after` on.
    fn nonces(&self, after: Option<Box<[u8]>>) -> NodeFuture<Option<NoncePage>>;

    /// Remembers the nonces that a peer has sent.
    fn keep_nonces(&self, nonces: Vec<ClaimedNonce>) -> NodeFuture<Option<()>>;

    /// Looks up the stamps of the messages that any node published under these ids, as long as ids are remembered. None if the lookup
    /// fails.
    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>) -> NodeFuture<Option<Vec<Option<Stamp>>>>;

    /// Remembers the ids under which a peer published, as far as there is memory.
    fn keep_ids(&self, scope: IdScope, ids: StampedIds);

    /// Rejects these tokens from the call on. Resolves when the revocations are stored, to None if they cannot be.
    fn revoke(&self, revocations: Vec<Revocation>) -> NodeFuture<Option<()>>;

    /// All revocations that are in force here.
    fn revocations(&self) -> Vec<Revocation>;

    /// Reads the queues of the store again. Resolves to None if they cannot be read.
    fn queues_changed(&self) -> NodeFuture<Option<()>>;

    /// True if all nodes share one store.
    fn is_store_shared(&self) -> bool;

    /// Resolves when every write that began before the call can be read or was refused. None without a shared store.
    fn settled(&self) -> NodeFuture<Option<()>>;

    /// Reads the messages that an incarnation has stored of a channel after a sequence, in order. None if the store cannot tell.
    fn stored(&self, behind: StoreBackfillQuery) -> NodeFuture<Option<Vec<ForwardedParts>>>;

    /// Stores what [`Routing::new`] gets at the next start. The last call wins, whichever write ends last.
    fn keep_nodes(&self, nodes: KeptNodes) -> NodeFuture<()>;
}

pub type NodeFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// An open request: the peers that may still answer, and where their answers go.
pub(super) struct PendingPeerRequest {
    from: Vec<u64>,
    answers: mpsc::Sender<(u64, PeerAnswer)>,
}

/// The answers to one request: at most one of each node that was asked.
pub(super) struct AnswerReceiver<'a> {
    routing: &'a Routing,
    number: u64,
    answers: mpsc::Receiver<(u64, PeerAnswer)>,
}

impl AnswerReceiver<'_> {
    /// Waits for the next answer. None once no asked peer can answer any more.
    pub(super) async fn next(&mut self) -> Option<PeerAnswer> {
        self.answers.recv().await.map(|(_, answer)| answer)
    }

    /// Waits for the next answer, with the incarnation of the peer that gave it.
    pub(super) async fn next_with_peer(&mut self) -> Option<(u64, PeerAnswer)> {
        self.answers.recv().await
    }
}

impl Drop for AnswerReceiver<'_> {
    fn drop(&mut self) {
        self.routing.pending_requests.lock().remove(&self.number);
    }
}

impl Routing {
    /// Sets the services of this node. Called once, before there are peers.
    pub fn set_local(&self, local: Arc<dyn LocalNode>) {
        self.local.set(local).ok();
    }

    /// Closes the connections of a client on every other node, and returns their number. None if a node does not answer.
    pub async fn close_client(&self, account: &AccountId, client_id: &ClientId) -> Option<u64> {
        let request = PeerRequest::CloseClient { account: account.clone(), client_id: client_id.clone() };
        let closed =
            |answer: &PeerAnswer| if let PeerAnswer::Closed(closed) = answer { Some(*closed) } else { None };
        self.ask_all_peers(&request).await?.iter().map(closed).sum()
    }

    /// Asks every member that is not down or that is reachable. None if one of them gives no answer.
    pub(super) async fn ask_all_peers(&self, request: &PeerRequest) -> Option<Vec<PeerAnswer>> {
        let everyone = self.peers_not_down();
        let count = everyone.len();
        let mut answers = self.ask(everyone, 0, request);
        let mut all = Vec::with_capacity(count);
        while let Some(answer) = answers.next().await {
            all.push(answer);
        }
        (all.len() == count).then_some(all)
    }

    /// Members that are alive, reachable or not down. A member that gossip misses for a moment still serves its clients.
    fn peers_not_down(&self) -> Vec<u64> {
        let members: Vec<u64> = self.peers.read().keys().copied().collect();
        let mut everyone = self.peers_alive();
        {
            let node_failures = self.node_failures.lock();
            everyone.extend(members.into_iter().filter(|member| {
                node_failures.incarnation_status(*member) != Some(IncarnationStatus::Ended)
            }));
        }
        everyone.sort_unstable();
        everyone.dedup();
        everyone
    }

    /// Sends a request to peers over the stream that `hash` selects.
    pub(super) fn ask(&self, to: Vec<u64>, hash: u64, request: &PeerRequest) -> AnswerReceiver<'_> {
        let number = self.next_number();
        let (sender, answers) = mpsc::channel(to.len().max(1));
        if !to.is_empty() {
            self.pending_requests
                .lock()
                .insert(number, PendingPeerRequest { from: to.clone(), answers: sender });
        }
        let item = PeerItem::request(number, request);
        for peer in to {
            match self.links.get().filter(|links| links.is_up(peer)) {
                Some(links) => drop(links.send(peer, hash, &item)),
                None => self.drop_expected_answers(peer, Some(number)),
            }
        }
        AnswerReceiver { routing: self, number, answers }
    }

    /// Asks one node. None if it does not answer within `wait`.
    pub(super) async fn ask_one(
        &self,
        peer: u64,
        hash: u64,
        request: &PeerRequest,
        wait: Duration,
    ) -> Option<PeerAnswer> {
        let mut answers = self.ask(vec![peer], hash, request);
        tokio::time::timeout(wait, answers.next()).await.ok()?
    }

    /// Peers that are alive and have a link.
    pub(super) fn reachable(&self) -> Vec<u64> {
        self.expected.lock().iter().copied().filter(|peer| self.is_up(*peer)).collect()
    }

    pub(super) fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes the answer of a peer. Drops one that no request awaits.
    pub(super) fn take_answer(&self, from: u64, number: u64, answer: PeerAnswer) {
        let mut pending = self.pending_requests.lock();
        let Some(waiting) = pending.get_mut(&number).filter(|waiting| waiting.from.contains(&from)) else {
            return;
        };
        waiting.from.retain(|peer| *peer != from);
        // The channel has space for one answer of each peer.
        waiting.answers.try_send((from, answer)).ok();
        if waiting.from.is_empty() {
            pending.remove(&number);
        }
    }

    /// Stops awaiting answers of this peer, to one request or to all.
    pub(super) fn drop_expected_answers(&self, peer: u64, to: Option<u64>) {
        self.pending_requests.lock().retain(|number, pending| {
            if to.is_none_or(|to| to == *number) {
                pending.from.retain(|from| *from != peer);
            }
            !pending.from.is_empty()
        });
    }

    /// Serves a request of a peer. None is a kind of a later minor version.
    pub(super) fn serve_request(&self, to: u64, number: u64, request: Option<PeerRequest>) {
        let (Some(routing), local) = (self.this.upgrade(), self.local.get()) else { return };
        // Taken before any lookup begins.
        let permits = request.as_ref().map_or(1, weight).min(LOCAL_MAX);
        let permit = Arc::clone(&self.local_waiting).try_acquire_many_owned(permits as u32);
        let answer: NodeFuture<Option<PeerAnswer>> = match (request, local) {
            (Some(PeerRequest::Backfill { key, after, back_ms }), _) => {
                return self.serve_backfill(to, number, key, after, back_ms);
            }
            (Some(PeerRequest::AcceptHandoff { key }), _) => return self.serve_handoff(to, number, key),
            (Some(PeerRequest::Load), Some(local)) => {
                let load = local.connections().map_or(PeerAnswer::Unknown, PeerAnswer::Loaded);
                return self.answer(to, number, &load);
            }
            (Some(PeerRequest::FetchReplay { key, after }), _) => {
                return self.serve_replay_fetch(to, number, key, after);
            }
            (Some(PeerRequest::CloseClient { account, client_id }), Some(local)) => {
                let closed = local.close_client(account, client_id);
                Box::pin(async move { closed.await.map(PeerAnswer::Closed) })
            }
            (Some(PeerRequest::Attached(keys)), Some(local)) => {
                let attached = local.attached(keys);
                Box::pin(async move { attached.await.map(PeerAnswer::Attached) })
            }
            (Some(PeerRequest::Claim(nonce)), Some(local)) => {
                Arc::clone(&routing).claimed_by_peer(local, nonce)
            }
            (Some(PeerRequest::NoncesAsked { after }), Some(local)) => {
                Arc::clone(&routing).nonces_for_peer(local, after)
            }
            (Some(PeerRequest::NoncesGiven { nonces, last }), Some(local)) => {
                Arc::clone(&routing).nonces_from_peer(local, to, nonces, last)
            }
            (Some(PeerRequest::Deliver { key, stamp }), Some(_)) => {
                let routing = Arc::clone(&routing);
                Box::pin(async move {
                    routing.deliver(&key, stamp).await;
                    Some(PeerAnswer::Done)
                })
            }
            (Some(PeerRequest::Settle), Some(local)) => Arc::clone(&routing).settled_for_peer(&**local),
            (Some(PeerRequest::Revoke(revocations)), Some(local)) => {
                let revoked = local.revoke(revocations);
                Box::pin(async move { revoked.await.map(|()| PeerAnswer::Done) })
            }
            (Some(PeerRequest::QueuesChanged), Some(local)) => {
                let read = local.queues_changed();
                Box::pin(async move { read.await.map(|()| PeerAnswer::Done) })
            }
            // An answer at once, so that the peer does not wait for this node.
            (Some(PeerRequest::ClaimIds(_)), _) if permit.is_err() => {
                return self.answer(to, number, &PeerAnswer::Unknown);
            }
            (Some(PeerRequest::ClaimIds(ids)), Some(local)) => self.ids_for_peer(local, to, ids),
            (None, _) | (_, None) => return self.answer(to, number, &PeerAnswer::Unknown),
        };
        let Ok(permit) = permit else { return };
        self.tasks.spawn("answer", OnStop::Cancel, async move {
            if let Ok(Some(answer)) = tokio::time::timeout(LOCAL_WAIT, answer).await {
                routing.answer(to, number, &answer);
            }
            drop(permit);
        });
    }

    /// Answers a request of a peer. If the peer is no member here yet, the answer is sent once it is one.
    pub(super) fn answer(&self, to: u64, number: u64, answer: &PeerAnswer) {
        let Some(links) = self.links.get() else { return };
        let item = PeerItem::answer(number, answer);
        // A late page of nonces would lack claims that came meanwhile, so the peer must ask again.
        let is_of_now = matches!(answer, PeerAnswer::Nonces(_));
        if !links.send(to, 0, &item).is_lost() || is_of_now || self.leaving.has_left(to) {
            return;
        }
        let mut early = self.early_answers.lock();
        // Tried again under the lock: if the link has come up meanwhile, nothing else would send the kept answer.
        if links.send(to, 0, &item).is_lost() {
            early.keep(to, item, Instant::now());
        }
    }

    /// Sends the kept answers of peers that are members now. Called once the links to all members are set.
    pub(super) fn send_early_answers(&self) {
        let Some(links) = self.links.get() else { return };
        let peers: HashSet<u64> = self.peers.read().keys().copied().collect();
        let mut early = self.early_answers.lock();
        for (to, answer) in early.take(|to| peers.contains(&to)) {
            // The peer became a member just now, and its link comes later.
            if links.send(to, 0, &answer).is_lost() {
                early.keep(to, answer, Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::{IdConflict, Inbound as _, InterestMessage, PeerNoncePage};
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;
    use crate::model::{ClientMessageIds, Limits};
    use crate::testing::SharedLocal;

    #[tokio::test]
    async fn answer_for_a_peer_not_yet_known_is_sent_once_it_is_known() {
        let node = RoutingTestNode::new();
        let answer = |number| node.routing.answer(PEER, number, &PeerAnswer::Done);
        answer(3);
        answer(4);
        node.routing.answer(PEER, 5, &PeerAnswer::Nonces(PeerNoncePage::default()));
        node.finds(&[]);
        assert_eq!(node.says(), []);
        node.has_a_link();
        node.finds_the_peer();
        let expected = [3, 4].map(|number| PeerItem::answer(number, &PeerAnswer::Done));
        assert_eq!(node.says(), expected);
        node.finds_the_peer();
        assert_eq!(node.says(), [], "once");
        answer(6);
        assert_eq!(node.says(), [PeerItem::answer(6, &PeerAnswer::Done)]);
    }

    #[tokio::test]
    async fn peer_that_said_goodbye_gets_no_more_answers() {
        let node = RoutingTestNode::new();
        node.has_a_link();
        node.finds_the_peer();
        node.routing.interest(&node.peer, InterestMessage::Goodbye { streams: 1, is_all: true });
        node.loses_its_links();
        node.routing.answer(PEER, 3, &PeerAnswer::Done);
        assert!(node.routing.early_answers.lock().0.is_empty());
    }

    #[tokio::test]
    async fn silent_peer_is_asked_until_it_is_down() {
        let node = RoutingTestNode::new();
        let (account, client) =
            (AccountId::new("a"), ClientId::new("ann", &Limits::default()).expect("a name"));
        let closed = async || node.routing.close_client(&account, &client).await;
        node.loses_sight_of_the_peer(false);
        assert_eq!(closed().await, None);
        node.loses_sight_of_the_peer(true);
        assert_eq!(closed().await, Some(0));
    }

    #[tokio::test]
    async fn ids_are_claimed_here_within_a_bound() {
        let node = RoutingTestNode::new();
        node.routing.set_local(SharedLocal::new(0, |_| None));
        node.has_a_link();
        node.finds_the_peer();
        let claim = |count: usize| {
            let scope = IdScope { key: node.key.clone(), key_name: "k1".into(), client_id: None };
            PeerRequest::ClaimIds(vec![ClientMessageIds { scope, ids: vec!["id".into(); count] }])
        };
        node.says();
        node.routing.request_received(&node.peer, 1, Some(claim(LOCAL_MAX * IDS_OF_A_REQUEST)));
        assert_eq!(node.says(), [], "it is looked up");
        node.routing.request_received(&node.peer, 2, Some(claim(1)));
        assert_eq!(node.says(), [PeerItem::answer(2, &PeerAnswer::Unknown)]);
    }

    #[test]
    fn early_answers_have_bounds_and_an_end() {
        let (mut early, now) = (EarlyAnswers::default(), Instant::now());
        let item = || PeerItem::answer(1, &PeerAnswer::Done);
        for _ in 0..EARLY_MAX + 5 {
            early.keep(PEER, item(), now);
        }
        assert_eq!(early.0.len(), EARLY_MAX);
        early.keep(PEER, item(), now + LOCAL_WAIT);
        assert_eq!(early.0.len(), 1, "nobody waits for the others any more");
        let large = PeerAnswer::ClaimedIds(vec![(0, IdConflict::UnderWay); EARLY_BYTES_MAX]);
        early.keep(PEER, PeerItem::answer(2, &large), now + LOCAL_WAIT);
        assert_eq!(early.0.len(), 1);
        assert_eq!(early.take(|to| to != PEER), []);
        assert_eq!(early.take(|to| to == PEER), [(PEER, item())]);
    }
}
