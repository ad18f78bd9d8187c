//! What one node asks others: requests under a number, and the answers as they come.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;

use super::super::inbound::{Answer, Request};
use super::super::link::Item;
use super::{Behind, KeptNodes, Routing};
use crate::model::{
    AccountId, ClientId, ForwardedParts, IdScope, KeptNonce, Nonce, NoncePage, Revocation, Stamp, StampedIds,
};
use crate::tasks::OnStop;

/// Requests of peers that are answered at a time, beside those for what was missed; further ones are left without an answer.
pub(super) const LOCAL_MAX: usize = 16_384;
/// By then nobody waits for an answer any more.
const LOCAL_WAIT: Duration = Duration::from_secs(5);

/// What a node does and knows beside its channels, for other nodes to ask for.
pub trait Local: Send + Sync + 'static {
    /// Ends every connection of the account under this client id here; how many. None when the node is stopping.
    fn close_client(&self, account: AccountId, client_id: ClientId) -> Later<Option<u64>>;

    /// How many there are.
    fn connections(&self) -> u64;

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

    /// The store is one that all nodes share.
    fn is_store_shared(&self) -> bool;

    /// Resolves when what was to be stored by then can be read, or was refused. None: there is no store that nodes share.
    fn settled(&self) -> Later<Option<()>>;

    /// All that a run has stored of a channel behind some message, in its order. None: that cannot be told.
    fn stored(&self, behind: Behind) -> Later<Option<Vec<ForwardedParts>>>;

    /// To be given to [`Routing::new`] at the next start.
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

    /// The answers of all members that are alive or can be reached; none when one of them cannot give any.
    async fn ask_everyone(&self, request: &Request) -> Option<Vec<Answer>> {
        let everyone = self.peers_alive();
        let count = everyone.len();
        let mut answers = self.ask(everyone, 0, request);
        let mut all = Vec::with_capacity(count);
        while let Some(answer) = answers.next().await {
            all.push(answer);
        }
        (all.len() == count).then_some(all)
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
        let answer: Later<Option<Answer>> = match (request, local) {
            (Some(Request::Refill { key, after, back_ms }), _) => {
                return self.asked_to_refill(to, number, key, after, back_ms);
            }
            (Some(Request::TakeOver { key }), _) => return self.asked_to_take_over(to, number, key),
            (Some(Request::Load), Some(local)) => {
                return self.answer(to, number, &Answer::Loaded(local.connections()));
            }
            (Some(Request::HandOver { key }), _) => return self.asked_to_hand_over(to, number, key),
            (Some(Request::CloseClient { account, client_id }), Some(local)) => {
                let closed = local.close_client(account, client_id);
                Box::pin(async move { closed.await.map(Answer::Closed) })
            }
            (Some(Request::Claim(nonce)), Some(local)) => Arc::clone(&routing).claimed_by_peer(local, nonce),
            (Some(Request::NoncesAsked { after }), Some(local)) => {
                Arc::clone(&routing).nonces_for_peer(local, after)
            }
            (Some(Request::NoncesGiven { nonces, last }), Some(local)) => {
                Arc::clone(&routing).nonces_from_peer(local, to, nonces, last)
            }
            (Some(Request::Settle), Some(local)) => Arc::clone(&routing).settled_for_peer(&**local),
            (Some(Request::Revoke(revocations)), Some(local)) => {
                let revoked = local.revoke(revocations);
                Box::pin(async move { revoked.await.map(|()| Answer::Done) })
            }
            (Some(Request::ClaimIds(ids)), Some(local)) => self.ids_for_peer(local, to, ids),
            (None, _) | (_, None) => return self.answer(to, number, &Answer::Unknown),
        };
        let Ok(permit) = Arc::clone(&self.local_waiting).try_acquire_owned() else { return };
        self.tasks.spawn("answer", OnStop::Cancel, async move {
            if let Ok(Some(answer)) = tokio::time::timeout(LOCAL_WAIT, answer).await {
                routing.answer(to, number, &answer);
            }
            drop(permit);
        });
    }

    pub(super) fn answer(&self, to: u64, number: u64, answer: &Answer) {
        if let Some(links) = self.links.get() {
            drop(links.send(to, 0, &Item::answer(number, answer)));
        }
    }
}
