//! Nodes that die while all is quiet: who was present there and does not come back leaves once, by one of the other nodes.

use std::collections::BTreeSet;
use std::time::Duration;

use super::client::Client;
use super::watch::name_of;
use super::{CHANNELS, CLIENTS, GONE_WITHIN, QUIET_ROUND, World};
use crate::model::{ChannelKey, PresenceAction};

/// A death is noticed within this, and all clients have heard of a leave.
const LEFT_WITHIN: Duration = Duration::from_secs(4);
/// Who comes back later than this before the members leave may find that they have.
const IN_TIME: Duration = Duration::from_secs(1);

/// What has happened to whom on which channel.
type Happened = (usize, PresenceAction, String);

/// What is still to come after a death.
struct Plan {
    dies_too: Option<Duration>,
    starts: Vec<(Duration, usize)>,
    back: Vec<(Duration, usize)>,
}

impl World {
    /// One node dies, and in some runs another one before anybody has left.
    pub(super) async fn lose_some(&mut self) {
        let before: Vec<_> = (0..CHANNELS).map(|channel| self.present_on(channel)).collect();
        self.clients.iter_mut().for_each(Client::forget_events);
        let (died, nodes) = (self.now, self.nodes.len());
        self.leaves_stored();
        self.came.clear();
        let mut plan = Plan { dies_too: None, starts: Vec::new(), back: Vec::new() };
        if self.random.u8(..3) == 0 {
            plan.dies_too = Some(self.within(self.grace));
        }
        let is_one = plan.dies_too.is_none();
        let mut lost = self.lose_one(&mut plan);
        let mut stored = Vec::new();
        // Where the one that was to let somebody leave has died too, each other one does so later.
        let within = if is_one { LEFT_WITHIN } else { GONE_WITHIN };
        let mut last = died;
        while self.now < last + self.grace + within {
            if plan.dies_too.take_if(|at| *at <= self.now).is_some() {
                last = self.now;
                lost.extend(self.lose_one(&mut plan));
            }
            self.go_on(&mut plan, nodes);
            self.round(QUIET_ROUND).await;
            stored.extend(self.leaves_stored());
            let is_early = self.now < died + self.grace;
            assert!(!is_early || stored.is_empty(), "{}: {stored:?} might have come back", self.at());
        }

        // Whose former connection was not known where it came back has another one, and may have been lost again.
        let mut happened: Vec<Happened> =
            self.came.drain(..).map(|(channel, name)| (channel, PresenceAction::Enter, name)).collect();
        let mut left = Vec::new();
        for (channel, before) in before.iter().enumerate() {
            let after = self.present_on(channel);
            let came = happened.iter().filter(|(of, ..)| *of == channel).map(|(.., name)| name);
            let gone = before.keys().chain(came).filter(|name| !after.contains_key(*name));
            left.extend(gone.map(|name| (channel, PresenceAction::Leave, name.clone())));
        }
        happened.extend(left.iter().cloned());
        self.check_told(&happened, &lost);
        let (mut stored, left) = (sorted(stored), sorted(left));
        assert!(!is_one || stored.is_sorted_by(|one, next| one != next), "{}: twice, {stored:?}", self.at());
        stored.dedup();
        assert_eq!(stored, left, "{}: leaves that nodes have stored", self.at());
        // A node that has come later may have been told of somebody just after another one had let that member leave.
        self.quiet(self.grace + GONE_WITHIN).await;
    }

    fn within(&mut self, time: Duration) -> Duration {
        let ms = u64::try_from(time.as_millis()).expect("a short time");
        self.now + Duration::from_millis(self.random.u64(..ms))
    }

    /// Its clients, of which some come back in time.
    fn lose_one(&mut self, plan: &mut Plan) -> BTreeSet<usize> {
        let node = self.any_alive();
        let was_there = |client: &usize| self.clients[*client].at.as_ref().is_some_and(|at| at.node == node);
        let lost: BTreeSet<usize> = (0..CLIENTS).filter(was_there).collect();
        self.kill(node);
        plan.starts.push((self.within(self.grace + LEFT_WITHIN), node));
        for client in lost.iter().copied() {
            let at = self.within(2 * self.grace);
            if at + IN_TIME < self.now + self.grace {
                plan.back.push((at, client));
            }
        }
        lost
    }

    fn go_on(&mut self, plan: &mut Plan, nodes: usize) {
        for (_, node) in plan.starts.extract_if(.., |(at, _)| *at <= self.now).collect::<Vec<_>>() {
            self.start_after(node);
        }
        for (_, client) in plan.back.extract_if(.., |(at, _)| *at <= self.now).collect::<Vec<_>>() {
            // Also one that knows of no other yet: nobody keeps clients from a node that begins.
            let is_ready = |node: &usize| *node < nodes || self.nodes[*node].routing.is_complete();
            let ready: Vec<usize> = self.alive().into_iter().filter(is_ready).collect();
            let node = ready[self.random.usize(..ready.len())];
            self.connect(client, node);
        }
    }

    /// Leaves that nodes have stored since this was asked last.
    fn leaves_stored(&self) -> Vec<Happened> {
        let events = self.nodes.iter().flat_map(|node| node.store.take());
        let leaves = events.filter(|event| event.action == PresenceAction::Leave);
        let channel =
            |key: &ChannelKey| self.keys.iter().position(|one| one == key).expect("one of the channels");
        leaves.map(|event| (channel(&event.key), event.action, name_of(&event.member))).collect()
    }

    /// Who watched all the time was told this and nothing else, once.
    fn check_told(&self, happened: &[Happened], but: &BTreeSet<usize>) {
        for client in (0..CLIENTS).filter(|client| !but.contains(client)) {
            for (channel, key) in self.keys.iter().enumerate() {
                let Some(watch) = self.clients[client].watch(key) else { continue };
                let told = watch.events.iter().map(|(action, name)| (channel, *action, name.clone()));
                let of_channel = happened.iter().filter(|(of, ..)| *of == channel).cloned();
                assert_eq!(sorted(told), sorted(of_channel), "{}, client {client}", self.at());
            }
        }
    }
}

fn sorted(happened: impl IntoIterator<Item = Happened>) -> Vec<Happened> {
    let mut sorted: Vec<Happened> = happened.into_iter().collect();
    sorted.sort_by(|(one, action, name), (other, of_other, named)| {
        (one, name, action.as_str()).cmp(&(other, named, of_other.as_str()))
    });
    sorted
}
