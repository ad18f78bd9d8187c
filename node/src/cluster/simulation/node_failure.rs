//! Node failures in an otherwise quiet cluster: each member of a failed node that does not return leaves exactly once, through one of the
//! other nodes.

use std::collections::BTreeSet;
use std::time::Duration;

use super::client::SimClient;
use super::watch::name_of;
use super::{CHANNELS, CLEARED_WITHIN, CLIENTS, QUIET_ROUND, SimWorld};
use crate::model::{ChannelKey, PresenceAction};

/// Bound within which a node failure is noticed and all clients have heard of a leave.
const LEFT_WITHIN: Duration = Duration::from_secs(4);
/// Safety margin: a client that returns later than this before its members leave may find that they have left.
const IN_TIME: Duration = Duration::from_secs(1);

/// A presence change: channel, action and member.
type SimPresenceChange = (usize, PresenceAction, String);

/// Events that are still to come after a node failure.
struct FailurePlan {
    fails_too: Option<Duration>,
    starts: Vec<(Duration, usize)>,
    back: Vec<(Duration, usize)>,
}

impl SimWorld {
    /// One node fails, and under some seeds another one before any member has left.
    pub(super) async fn lose_some(&mut self) {
        let before: Vec<_> = (0..CHANNELS).map(|channel| self.present_on(channel)).collect();
        self.clients.iter_mut().for_each(SimClient::forget_events);
        let (died, nodes) = (self.now, self.nodes.len());
        self.leaves_stored();
        self.came.clear();
        let mut plan = FailurePlan { fails_too: None, starts: Vec::new(), back: Vec::new() };
        if self.random.u8(..3) == 0 {
            plan.fails_too = Some(self.within(self.presence_timeout));
        }
        let is_one = plan.fails_too.is_none();
        let mut lost = self.lose_one(&mut plan);
        let mut stored = Vec::new();
        // If the node that was responsible for the leaves has failed too, each other node issues them later.
        let within = if is_one { LEFT_WITHIN } else { CLEARED_WITHIN };
        let mut last = died;
        while self.now < last + self.presence_timeout + within {
            if plan.fails_too.take_if(|at| *at <= self.now).is_some() {
                last = self.now;
                lost.extend(self.lose_one(&mut plan));
            }
            self.go_on(&mut plan, nodes);
            self.round(QUIET_ROUND).await;
            stored.extend(self.leaves_stored());
            let is_early = self.now < died + self.presence_timeout;
            assert!(!is_early || stored.is_empty(), "{}: {stored:?} might have come back", self.at());
        }

        // A client whose earlier connection was unknown at the new node has another one, and may have lost that again.
        let mut happened: Vec<SimPresenceChange> =
            self.came.drain(..).map(|(channel, name)| (channel, PresenceAction::Enter, name)).collect();
        let mut left = Vec::new();
        for (channel, before) in before.iter().enumerate() {
            let after = self.present_on(channel);
            let came = happened.iter().filter(|(of, ..)| *of == channel).map(|(.., name)| name);
            let removed = before.keys().chain(came).filter(|name| !after.contains_key(*name));
            left.extend(removed.map(|name| (channel, PresenceAction::Leave, name.clone())));
        }
        happened.extend(left.iter().cloned());
        self.check_events(&happened, &lost);
        let (mut stored, left) = (sorted(stored), sorted(left));
        assert!(!is_one || stored.is_sorted_by(|one, next| one != next), "{}: twice, {stored:?}", self.at());
        stored.dedup();
        assert_eq!(stored, left, "{}: leaves that nodes have stored", self.at());
        // A node that joined later may have learned of a member just after another node had let it leave.
        self.quiet(self.presence_timeout + CLEARED_WITHIN).await;
    }

    fn within(&mut self, time: Duration) -> Duration {
        let ms = u64::try_from(time.as_millis()).expect("a short time");
        self.now + Duration::from_millis(self.random.u64(..ms))
    }

    /// Fails one node. Returns its clients; some of them are scheduled to return in time.
    fn lose_one(&mut self, plan: &mut FailurePlan) -> BTreeSet<usize> {
        let node = self.any_alive();
        let was_there = |client: &usize| self.clients[*client].at.as_ref().is_some_and(|at| at.node == node);
        let lost: BTreeSet<usize> = (0..CLIENTS).filter(was_there).collect();
        self.kill(node);
        plan.starts.push((self.within(self.presence_timeout + LEFT_WITHIN), node));
        for client in lost.iter().copied() {
            let at = self.within(2 * self.presence_timeout);
            if at + IN_TIME < self.now + self.presence_timeout {
                plan.back.push((at, client));
            }
        }
        lost
    }

    fn go_on(&mut self, plan: &mut FailurePlan, nodes: usize) {
        for (_, node) in plan.starts.extract_if(.., |(at, _)| *at <= self.now).collect::<Vec<_>>() {
            self.start_after(node);
        }
        for (_, client) in plan.back.extract_if(.., |(at, _)| *at <= self.now).collect::<Vec<_>>() {
            // Even a node that knows no other yet may be chosen: nothing keeps clients from a node that starts.
            let is_ready = |node: &usize| *node < nodes || self.nodes[*node].routing.is_complete();
            let ready: Vec<usize> = self.alive().into_iter().filter(is_ready).collect();
            let node = ready[self.random.usize(..ready.len())];
            self.connect(client, node);
        }
    }

    /// Leaves that nodes have stored since the last call.
    fn leaves_stored(&self) -> Vec<SimPresenceChange> {
        let events = self.nodes.iter().flat_map(|node| node.store.take());
        let leaves = events.filter(|event| event.action == PresenceAction::Leave);
        let channel =
            |key: &ChannelKey| self.keys.iter().position(|one| one == key).expect("one of the channels");
        leaves.map(|event| (channel(&event.key), event.action, name_of(&event.member))).collect()
    }

    /// Asserts that every client that watched all the time was told exactly these changes, once.
    fn check_events(&self, happened: &[SimPresenceChange], but: &BTreeSet<usize>) {
        for client in (0..CLIENTS).filter(|client| !but.contains(client)) {
            for (channel, key) in self.keys.iter().enumerate() {
                let Some(watch) = self.clients[client].watch(key) else { continue };
                let seen = watch.events.iter().map(|(action, name)| (channel, *action, name.clone()));
                let of_channel = happened.iter().filter(|(of, ..)| *of == channel).cloned();
                assert_eq!(sorted(seen), sorted(of_channel), "{}, client {client}", self.at());
            }
        }
    }
}

fn sorted(happened: impl IntoIterator<Item = SimPresenceChange>) -> Vec<SimPresenceChange> {
    let mut sorted: Vec<SimPresenceChange> = happened.into_iter().collect();
    sorted.sort_by(|(one, action, name), (other, of_other, named)| {
        (one, name, action.as_str()).cmp(&(other, named, of_other.as_str()))
    });
    sorted
}
