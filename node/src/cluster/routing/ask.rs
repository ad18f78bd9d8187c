//! What one node asks others: requests under a number, and the answers as they come.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::inbound::{Answer, Request};
use super::super::link::Item;
use super::{Behind, KeptNodes, Routing};
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ClientId, ForwardedParts, IdScope, KeptNonce, Nonce, NoncePage,
    Revocation, Run, Stamp, StampedIds,
};
use crate::tasks::OnStop;

/// Requests of peers that are answered at a time, beside those for what was missed; further ones are left without an answer. So many
/// ids, or channels, are as much as a request.
pub(super) const LOCAL_MAX: usize = 16_384;
const IDS_OF_A_REQUEST: usize = 16;
/// By then nobody waits for an answer any more.
const LOCAL_WAIT: Duration = Duration::from_secs(5);

/// Answers to nodes that are not linked to yet, in all.
const EARLY_MAX: usize = 1_024;
const EARLY_BYTES_MAX: usize = 1 << 20;

/// In requests.
fn weight(request: &Request) -> usize {
    match request {
        Request::ClaimIds(ids) => {
            1 + ids.iter().map(|given| given.ids.len()).sum::<usize>() / IDS_OF_A_REQUEST
        }
        Request::Attached(keys) => 1 + keys.len() / IDS_OF_A_REQUEST,
        _ => 1,
    }
}

/// Answers to nodes that have linked to this one before gossip has told it of them, the longest kept in front.
#[derive(Default)]
pub(super) struct EarlyAnswers(VecDeque<(Instant, u64, Item)>);

impl EarlyAnswers {
    fn keep(&mut self, to: u64, answer: Item, now: Instant) {
        let is_late = |since: Instant| now.saturating_duration_since(since) >= LOCAL_WAIT;
        while self.0.front().is_some_and(|(since, ..)| is_late(*since)) {
            self.0.pop_front();
        }
        let bytes: usize = self.0.iter().map(|(_, _, item)| item.bytes()).sum();
        if self.0.len() < EARLY_MAX && bytes + answer.bytes() <= EARLY_BYTES_MAX {
            self.0.push_back((now, to, answer));
        }
    }

    fn take(&mut self, linked: impl Fn(u64) -> bool) -> Vec<(u64, Item)> {
        let (of_linked, others) = std::mem::take(&mut self.0).into_iter().partition(|(_, to, _)| linked(*to));
        self.0 = others;
        of_linked.into_iter().map(|(_, to, answer): (Instant, _, _)| (to, answer)).collect()
    }
}

/// What a node does and knows beside its channels, for other nodes to ask for.
pub trait Local: Send + Sync + 'static {
    /// Ends every connection of the account under this client id here; how many. None when the node is stopping.
    fn close_client(&self, account: AccountId, client_id: ClientId) -> Later<Option<u64>>;

    /// The number of connections here. None while no further one is taken.
    fn connections(&self) -> Option<u64>;

    /// How many of them are attached to each of these channels. None when the node is stopping.
    fn attached(&self, keys: Vec<ChannelKey>) -> Later<Option<Vec<AttachedCount>>>;

    /// By the clock that credentials are held against.
    fn now_ms(&self) -> u64;

    /// False: the nonce is remembered here. None: it cannot be.
    fn claim_nonce(&self, nonce: Nonce) -> Later<Option<bool>>;

    /// Some of what is remembered here, from that place on.
    fn nonces(&self, after: Option<Box<[u8]>>) -> Later<Option<NoncePage>>;

    /// Remembers these, too.
    fn keep_nonces(&self, nonces: Vec<KeptNonce>) -> Later<Option<()>>;

    /// What was published here within the time in which ids are remembered, by messages of this node and others. None: nobody knows.
    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>) -> Later<Option<Vec<Option<Stamp>>>>;

    /// Remembers what another node published, as far as there is room.
    fn keep_ids(&self, scope: IdScope, ids: StampedIds);

    /// Takes these tokens no more from when it is called on; resolves when that is remembered. None: it cannot be.
    fn revoke(&self, revocations: Vec<Revocation>) -> Later<Option<()>>;

    /// All revocations that are in force here.
    fn revocations(&self) -> Vec<Revocation>;

    /// Resolves when the queues in the store were read again. None: they could not be.
    fn queues_changed(&self) -> Later<Option<()>>;

    /// The store is one that all nodes share.
    fn is_store_shared(&self) -> bool;

    /// Resolves when what was to be stored by then can be read, or was refused. None: there is no store that nodes share.
    fn settled(&self) -> Later<Option<()>>;

    /// All that a run has stored of a channel behind some message, in its order. None: that cannot be told.
    fn stored(&self, behind: Behind) -> Later<Option<Vec<ForwardedParts>>>;

    /// To be given to [`Routing::new`] at the next start: what was handed over last, whenever that is written.
    fn keep_nodes(&self, nodes: KeptNodes) -> Later<()>;
}

pub type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Who may still answer a request, and where that goes.
pub(super) struct Asked {
    from: Vec<u64>,
    answers: mpsc::Sender<(u64, Answer)>,
}

/// The answers to one request: at most one of each node that was asked.
pub(super) struct Answers<'a> {
    routing: &'a Routing,
    number: u64,
    answers: mpsc::Receiver<(u64, Answer)>,
}

impl Answers<'_> {
    /// None when nobody is left who may answer.
    pub(super) async fn next(&mut self) -> Option<Answer> {
        self.answers.recv().await.map(|(_, answer)| answer)
    }

    /// The same, with the node that gave it.
    pub(super) async fn next_of(&mut self) -> Option<(u64, Answer)> {
        self.answers.recv().await
    }
}

impl Drop for Answers<'_> {
    fn drop(&mut self) {
        self.routing.asked.lock().remove(&self.number);
    }
}

impl Routing {
    /// To be called once, before there are peers.
    pub fn set_local(&self, local: Arc<dyn Local>) {
        self.local.set(local).ok();
    }

    /// Ends the connections of a client on every other node; how many. None when one of them does not answer.
    pub async fn close_client(&self, account: &AccountId, client_id: &ClientId) -> Option<u64> {
        let request = Request::CloseClient { account: account.clone(), client_id: client_id.clone() };
        let closed = |answer: &Answer| if let Answer::Closed(closed) = answer { Some(*closed) } else { None };
        self.ask_everyone(&request).await?.iter().map(closed).sum()
    }

    /// The answers of all members that are not held for dead, or can be reached; none when one of them cannot give any.
    pub(super) async fn ask_everyone(&self, request: &Request) -> Option<Vec<Answer>> {
        let everyone = self.everyone();
        let count = everyone.len();
        let mut answers = self.ask(everyone, 0, request);
        let mut all = Vec::with_capacity(count);
        while let Some(answer) = answers.next().await {
            all.push(answer);
        }
        (all.len() == count).then_some(all)
    }

    /// One that is silent for a moment still serves its clients.
    fn everyone(&self) -> Vec<u64> {
        let members: Vec<u64> = self.peers.read().keys().copied().collect();
        let mut everyone = self.peers_alive();
        {
            let deaths = self.deaths.lock();
            everyone.extend(members.into_iter().filter(|member| deaths.run(*member) != Some(Run::Ended)));
        }
        everyone.sort_unstable();
        everyone.dedup();
        everyone
    }

    /// Asks nodes over the lane that `hash` chooses.
    pub(super) fn ask(&self, to: Vec<u64>, hash: u64, request: &Request) -> Answers<'_> {
        let number = self.next_number();
        let (sender, answers) = mpsc::channel(to.len().max(1));
        if !to.is_empty() {
            self.asked.lock().insert(number, Asked { from: to.clone(), answers: sender });
        }
        let item = Item::request(number, request);
        for peer in to {
            match self.links.get().filter(|links| links.is_up(peer)) {
                Some(links) => drop(links.send(peer, hash, &item)),
                None => self.answers_no_more(peer, Some(number)),
            }
        }
        Answers { routing: self, number, answers }
    }

    /// What one node answers within `wait`.
    pub(super) async fn ask_one(
        &self,
        peer: u64,
        hash: u64,
        request: &Request,
        wait: Duration,
    ) -> Option<Answer> {
        let mut answers = self.ask(vec![peer], hash, request);
        tokio::time::timeout(wait, answers.next()).await.ok()?
    }

    /// Those that are alive and linked to.
    pub(super) fn reachable(&self) -> Vec<u64> {
        self.expected.lock().iter().copied().filter(|peer| self.is_up(*peer)).collect()
    }

    pub(super) fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A peer has answered.
    pub(super) fn taken(&self, from: u64, number: u64, answer: Answer) {
        let mut asked = self.asked.lock();
        let Some(waiting) = asked.get_mut(&number).filter(|waiting| waiting.from.contains(&from)) else {
            return;
        };
        waiting.from.retain(|peer| *peer != from);
        // There is room for one of each.
        waiting.answers.try_send((from, answer)).ok();
        if waiting.from.is_empty() {
            asked.remove(&number);
        }
    }

    /// Nothing comes from this peer, to one request or to all.
    pub(super) fn answers_no_more(&self, peer: u64, to: Option<u64>) {
        self.asked.lock().retain(|number, asked| {
            if to.is_none_or(|to| to == *number) {
                asked.from.retain(|from| *from != peer);
            }
            !asked.from.is_empty()
        });
    }

    /// A peer asks. None is what a later minor may ask.
    pub(super) fn asked_for(&self, to: u64, number: u64, request: Option<Request>) {
        let (Some(routing), local) = (self.this.upgrade(), self.local.get()) else { return };
        // Before anything is looked up for it.
        let permits = request.as_ref().map_or(1, weight).min(LOCAL_MAX);
        let permit = Arc::clone(&self.local_waiting).try_acquire_many_owned(permits as u32);
        let answer: Later<Option<Answer>> = match (request, local) {
            (Some(Request::Refill { key, after, back_ms }), _) => {
                return self.asked_to_refill(to, number, key, after, back_ms);
            }
            (Some(Request::TakeOver { key }), _) => return self.asked_to_take_over(to, number, key),
            (Some(Request::Load), Some(local)) => {
                let load = local.connections().map_or(Answer::Unknown, Answer::Loaded);
                return self.answer(to, number, &load);
            }
            (Some(Request::HandOver { key, after }), _) => {
                return self.asked_to_hand_over(to, number, key, after);
            }
            (Some(Request::CloseClient { account, client_id }), Some(local)) => {
                let closed = local.close_client(account, client_id);
                Box::pin(async move { closed.await.map(Answer::Closed) })
            }
            (Some(Request::Attached(keys)), Some(local)) => {
                let attached = local.attached(keys);
                Box::pin(async move { attached.await.map(Answer::Attached) })
            }
            (Some(Request::Claim(nonce)), Some(local)) => Arc::clone(&routing).claimed_by_peer(local, nonce),
            (Some(Request::NoncesAsked { after }), Some(local)) => {
                Arc::clone(&routing).nonces_for_peer(local, after)
            }
            (Some(Request::NoncesGiven { nonces, last }), Some(local)) => {
                Arc::clone(&routing).nonces_from_peer(local, to, nonces, last)
            }
            (Some(Request::Deliver { key, stamp }), Some(_)) => {
                let routing = Arc::clone(&routing);
                Box::pin(async move {
                    routing.deliver(&key, stamp).await;
                    Some(Answer::Done)
                })
            }
            (Some(Request::Settle), Some(local)) => Arc::clone(&routing).settled_for_peer(&**local),
            (Some(Request::Revoke(revocations)), Some(local)) => {
                let revoked = local.revoke(revocations);
                Box::pin(async move { revoked.await.map(|()| Answer::Done) })
            }
            (Some(Request::QueuesChanged), Some(local)) => {
                let read = local.queues_changed();
                Box::pin(async move { read.await.map(|()| Answer::Done) })
            }
            // Then it does not wait for this node.
            (Some(Request::ClaimIds(_)), _) if permit.is_err() => {
                return self.answer(to, number, &Answer::Unknown);
            }
            (Some(Request::ClaimIds(ids)), Some(local)) => self.ids_for_peer(local, to, ids),
            (None, _) | (_, None) => return self.answer(to, number, &Answer::Unknown),
        };
        let Ok(permit) = permit else { return };
        self.tasks.spawn("answer", OnStop::Cancel, async move {
            if let Ok(Some(answer)) = tokio::time::timeout(LOCAL_WAIT, answer).await {
                routing.answer(to, number, &answer);
            }
            drop(permit);
        });
    }

    /// Whoever asks may have linked to this node before it is a member here: then it has its answer when it is.
    pub(super) fn answer(&self, to: u64, number: u64, answer: &Answer) {
        let Some(links) = self.links.get() else { return };
        let item = Item::answer(number, answer);
        // What is remembered now says nothing of what is claimed before it is there: that is asked for again.
        let is_of_now = matches!(answer, Answer::Nonces(_));
        if !links.send(to, 0, &item).is_lost() || is_of_now || self.leaving.has_left(to) {
            return;
        }
        let mut early = self.early_answers.lock();
        // It may be linked to meanwhile, and then nobody sends what is kept.
        if links.send(to, 0, &item).is_lost() {
            early.keep(to, item, Instant::now());
        }
    }

    /// To be called when there are links to all members.
    pub(super) fn answer_early(&self) {
        let Some(links) = self.links.get() else { return };
        let peers: HashSet<u64> = self.peers.read().keys().copied().collect();
        let mut early = self.early_answers.lock();
        for (to, answer) in early.take(|to| peers.contains(&to)) {
            // It became a member just now, and its link comes after this.
            if links.send(to, 0, &answer).is_lost() {
                early.keep(to, answer, Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::{Inbound as _, Interest, NoncesKnown, Taken};
    use super::super::fixture::{Node, PEER};
    use super::*;
    use crate::model::{GivenIds, Limits};
    use crate::testing::SharedLocal;

    #[tokio::test]
    async fn answer_for_a_peer_not_yet_known_is_sent_once_it_is_known() {
        let node = Node::new();
        let answer = |number| node.routing.answer(PEER, number, &Answer::Done);
        answer(3);
        answer(4);
        node.routing.answer(PEER, 5, &Answer::Nonces(NoncesKnown::default()));
        node.finds(&[]);
        assert_eq!(node.says(), []);
        node.has_a_link();
        node.finds_the_peer();
        let expected = [3, 4].map(|number| Item::answer(number, &Answer::Done));
        assert_eq!(node.says(), expected);
        node.finds_the_peer();
        assert_eq!(node.says(), [], "once");
        answer(6);
        assert_eq!(node.says(), [Item::answer(6, &Answer::Done)]);
    }

    #[tokio::test]
    async fn peer_that_said_goodbye_gets_no_more_answers() {
        let node = Node::new();
        node.has_a_link();
        node.finds_the_peer();
        node.routing.interest(&node.peer, Interest::Left { lanes: 1, is_all: true });
        node.loses_its_links();
        node.routing.answer(PEER, 3, &Answer::Done);
        assert!(node.routing.early_answers.lock().0.is_empty());
    }

    #[tokio::test]
    async fn silent_peer_is_asked_until_it_is_down() {
        let node = Node::new();
        let (account, client) =
            (AccountId::new("a"), ClientId::new("ann", &Limits::default()).expect("a name"));
        let closed = async || node.routing.close_client(&account, &client).await;
        node.does_not_hear_the_peer(false);
        assert_eq!(closed().await, None);
        node.does_not_hear_the_peer(true);
        assert_eq!(closed().await, Some(0));
    }

    #[tokio::test]
    async fn ids_are_claimed_here_within_a_bound() {
        let node = Node::new();
        node.routing.set_local(SharedLocal::new(0, |_| None));
        node.has_a_link();
        node.finds_the_peer();
        let claim = |count: usize| {
            let scope = IdScope { key: node.key.clone(), key_name: "k1".into(), client_id: None };
            Request::ClaimIds(vec![GivenIds { scope, ids: vec!["id".into(); count] }])
        };
        node.says();
        node.routing.asked(&node.peer, 1, Some(claim(LOCAL_MAX * IDS_OF_A_REQUEST)));
        assert_eq!(node.says(), [], "it is looked up");
        node.routing.asked(&node.peer, 2, Some(claim(1)));
        assert_eq!(node.says(), [Item::answer(2, &Answer::Unknown)]);
    }

    #[test]
    fn early_answers_have_bounds_and_an_end() {
        let (mut early, now) = (EarlyAnswers::default(), Instant::now());
        let item = || Item::answer(1, &Answer::Done);
        for _ in 0..EARLY_MAX + 5 {
            early.keep(PEER, item(), now);
        }
        assert_eq!(early.0.len(), EARLY_MAX);
        early.keep(PEER, item(), now + LOCAL_WAIT);
        assert_eq!(early.0.len(), 1, "nobody waits for the others any more");
        let large = Answer::ClaimedIds(vec![(0, Taken::UnderWay); EARLY_BYTES_MAX]);
        early.keep(PEER, Item::answer(2, &large), now + LOCAL_WAIT);
        assert_eq!(early.0.len(), 1);
        assert_eq!(early.take(|to| to != PEER), []);
        assert_eq!(early.take(|to| to == PEER), [(PEER, item())]);
    }
}
