//! Failures of peers: clients that may have missed messages of a failed peer are told of a continuity loss.
//!
//! An ack waits for the ack of every reachable peer that is interested in the channel. So every message that an incarnation has
//! acknowledged is here if all its streams to this node ended at once, no item had waited in them for long, and no stream had gone silent
//! or lost items. Any other incarnation may have acknowledged messages that are lost with it.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::store_backfill::LossEffect;
use super::{LocalInterest, Routing};
use crate::model;

/// Time within which all streams of a killed process end.
const AT_ONCE: Duration = Duration::from_millis(300);
/// Time within which membership notices a failure. An incarnation whose streams ended earlier has lived on without them.
const NOTICED_WITHIN: Duration = Duration::from_secs(3);
/// Most incarnations whose streams are tracked, members or not.
const INCARNATIONS_MAX: usize = 1024;

/// Status of another node by gossip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GossipStatus {
    pub incarnation: u64,
    pub is_down: bool,
    pub is_draining: bool,
    /// True if peers see the node and this node does not.
    pub is_seen_by_others: bool,
    /// True if the node may have clients: it has met other nodes, or has found that none answers.
    pub has_clients: bool,
}

/// Gap between two checks from which on this node has stalled and received nothing from any peer.
const STALL_AFTER: Duration = Duration::from_secs(1);
/// Time after a stall within which the failures that it hid are noticed.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

/// Incarnations of other nodes whose failure matters here, and the recent failures.
#[derive(Debug, Default)]
pub(super) struct NodeFailures {
    incarnations: HashMap<u64, TrackedIncarnation>,
    /// Time of the last failure, or of the last incomplete handoff.
    last: Option<Instant>,
    looked: Option<Instant>,
    /// Begin and end of the last stall of this node.
    last_stall: Option<(Instant, Instant)>,
}

#[derive(Debug, Default)]
struct TrackedIncarnation {
    is_member: bool,
    is_down: bool,
    /// True if peers see the node and this node does not.
    is_seen_by_others: bool,
    is_draining: bool,
    /// True if the node may have clients.
    has_clients: bool,
    /// True after its goodbye: all its items for this node are here.
    has_left: bool,
    /// True once it has opened a stream to this node.
    is_met: bool,
    /// Numbers of its open streams to this node.
    open_streams: HashSet<u32>,
    link: PeerLinkState,
    /// Time at which the first of its streams ended, since one was opened last.
    ended: Option<Instant>,
    /// True as long as no item of its streams is known to be missing.
    is_contiguous: bool,
    /// Numbers of the channels whose stored messages are all here since it went down.
    complete: HashSet<u64>,
}

/// State of the link to an incarnation.
#[derive(Debug, Clone, Copy, Default)]
enum PeerLinkState {
    #[default]
    Never,
    Up,
    Down(Instant),
}

/// Change in the membership of an incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MembershipChange {
    /// Membership holds the incarnation for down.
    Down {
        is_in_doubt: bool,
        is_met: bool,
    },
    Back,
    /// The incarnation is no member any more, for good.
    Removed {
        is_reported: bool,
        is_in_doubt: bool,
        is_met: bool,
    },
}

impl MembershipChange {
    /// True if the incarnation ended after it had opened a stream to this node.
    fn is_met(self) -> bool {
        matches!(self, Self::Down { is_met: true, .. } | Self::Removed { is_met: true, .. })
    }

    /// True if the end was handled before and leaves nothing in doubt.
    fn is_settled(self) -> bool {
        matches!(self, Self::Removed { is_reported: true, is_in_doubt: false, .. })
    }
}

impl TrackedIncarnation {
    fn troubled_for(&self) -> Duration {
        NOTICED_WITHIN + self.ended.map_or(Duration::ZERO, |ended| ended.elapsed())
    }

    /// Time since which the incarnation has published nothing, if it has failed. None while a stream is open or an item may be missing.
    fn silent_since(&self) -> Option<Instant> {
        self.ended.filter(|_| self.is_contiguous && self.open_streams.is_empty())
    }

    fn is_in_doubt(&self) -> bool {
        self.is_met && !self.is_contiguous && !self.has_left
    }
}

impl NodeFailures {
    fn stream_opened(&mut self, incarnation: u64, stream: u32) {
        if self.incarnations.len() >= INCARNATIONS_MAX && !self.incarnations.contains_key(&incarnation) {
            return;
        }
        let tracked = self.incarnations.entry(incarnation).or_default();
        tracked.open_streams.insert(stream);
        tracked.complete.clear();
        (tracked.is_met, tracked.ended, tracked.is_contiguous) = (true, None, true);
    }

    /// Status of a member by gossip, also of one that this node has not met. None for other incarnations.
    pub(super) fn incarnation_status(&self, incarnation: u64) -> Option<model::IncarnationStatus> {
        let tracked = self.incarnations.get(&incarnation).filter(|tracked| tracked.is_member)?;
        Some(if tracked.is_down { model::IncarnationStatus::Ended } else { model::IncarnationStatus::Alive })
    }

    /// True if peers see the incarnation and this node does not.
    pub(super) fn is_seen_by_others(&self, incarnation: u64) -> bool {
        self.incarnations.get(&incarnation).is_some_and(|tracked| tracked.is_seen_by_others)
    }

    /// True if gossip reports that the incarnation drains.
    pub(super) fn is_draining(&self, incarnation: u64) -> bool {
        self.incarnations.get(&incarnation).is_some_and(|tracked| tracked.is_draining)
    }

    /// True for a member that is neither down nor draining and has not said goodbye: its failure would be noticed.
    pub(super) fn is_failure_noticed(&self, incarnation: u64) -> bool {
        let is_missed = |tracked: &TrackedIncarnation| {
            tracked.is_member && !tracked.is_down && !tracked.has_left && !tracked.is_draining
        };
        self.incarnations.get(&incarnation).is_some_and(is_missed)
    }

    /// Records that the link to the incarnation is up or has ended.
    pub(super) fn linked(&mut self, incarnation: u64, up: bool) {
        if let Some(tracked) = self.incarnations.get_mut(&incarnation) {
            tracked.link = if up { PeerLinkState::Up } else { PeerLinkState::Down(Instant::now()) };
        }
    }

    /// True for an unreachable incarnation whose link ended just now while streams are open. After a failure the streams end at once,
    /// too.
    pub(super) fn is_ending(&self, incarnation: u64) -> bool {
        let is_ending = |tracked: &TrackedIncarnation| {
            let ends = match tracked.link {
                PeerLinkState::Never => false,
                // The report that the link has ended is on its way.
                PeerLinkState::Up => true,
                PeerLinkState::Down(since) => since.elapsed() <= AT_ONCE,
            };
            ends && !tracked.open_streams.is_empty() && !tracked.has_left
        };
        self.incarnations.get(&incarnation).is_some_and(is_ending)
    }

    /// True while a stream of the incarnation is open, so that items may still come.
    pub(super) fn has_open_streams(&self, incarnation: u64) -> bool {
        self.incarnations.get(&incarnation).is_some_and(|tracked| !tracked.open_streams.is_empty())
    }

    /// True if the incarnation was met and all its streams have ended.
    pub(super) fn has_ended(&self, incarnation: u64) -> bool {
        self.incarnations
            .get(&incarnation)
            .is_some_and(|tracked| tracked.is_met && tracked.open_streams.is_empty())
    }

    fn left(&mut self, incarnation: u64) {
        if let Some(tracked) = self.incarnations.get_mut(&incarnation) {
            tracked.has_left = true;
        }
    }

    /// Records that a peer has left before all its channels were handed off.
    pub(super) fn record_incomplete_handoff(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Longest time for which messages of the incarnation may be missing: the time to notice a failure, plus the time since its first
    /// stream ended and since a recent stall of this node.
    pub(super) fn troubled_for(&self, incarnation: u64) -> Duration {
        self.with_own(
            self.incarnations.get(&incarnation).map_or(NOTICED_WITHIN, TrackedIncarnation::troubled_for),
        )
    }

    fn with_own(&self, troubled_for: Duration) -> Duration {
        let lately = self.last_stall.filter(|(_, until)| until.elapsed() <= SETTLED_WITHIN);
        troubled_for + lately.map_or(Duration::ZERO, |(since, _)| since.elapsed())
    }

    /// Records a check, and a stall if the last one was too long ago. Called several times a second.
    pub(super) fn looked(&mut self, now: Instant) {
        if let Some(before) = self.looked.replace(now)
            && now.saturating_duration_since(before) >= STALL_AFTER
        {
            self.last_stall = Some((before, now));
        }
    }

    pub(super) fn is_complete(&self, incarnation: u64, channel: u64) -> bool {
        self.incarnations
            .get(&incarnation)
            .is_some_and(|tracked| tracked.complete.contains(&channel) && !tracked.is_in_doubt())
    }

    /// True if the incarnation is in doubt: it may be partitioned and taking publishes.
    pub(super) fn may_be_publishing(&self, incarnation: u64) -> bool {
        self.incarnations.get(&incarnation).is_some_and(TrackedIncarnation::is_in_doubt)
    }

    /// True if an incarnation has failed within this time, or may have.
    pub(super) fn has_lost(&self, within: Duration) -> bool {
        let is_lately = |ended: Instant| ended.elapsed() <= within;
        let may_be_down = |tracked: &TrackedIncarnation| {
            // An incarnation in doubt may deliver messages as long as it is a member.
            let may_miss = |ended| tracked.is_in_doubt() || is_lately(ended);
            tracked.is_met && !tracked.has_left && tracked.ended.is_some_and(may_miss)
        };
        self.last.is_some_and(|died| died.elapsed() <= within) || self.incarnations.values().any(may_be_down)
    }

    /// True if a member that may have clients was never met, is not in `alive` and is not down yet.
    pub(super) fn has_unmet_member(&self, alive: &[u64]) -> bool {
        let is_unmet = |tracked: &TrackedIncarnation| {
            let may_have_died =
                tracked.is_member && !tracked.is_down && !tracked.is_draining && !tracked.has_left;
            may_have_died && tracked.has_clients && !tracked.is_met
        };
        self.incarnations
            .iter()
            .any(|(incarnation, tracked)| is_unmet(tracked) && !alive.contains(incarnation))
    }

    /// Records that all messages that the incarnation has stored of the channel are here.
    pub(super) fn completed(&mut self, incarnation: u64, channel: u64) {
        if let Some(tracked) = self.incarnations.get_mut(&incarnation).filter(|tracked| tracked.is_down) {
            tracked.complete.insert(channel);
        }
    }

    /// Records the end of a stream. True if it was the last one of a down incarnation that may have acknowledged messages that are not
    /// here.
    fn stream_ended(&mut self, incarnation: u64, stream: u32, is_contiguous: bool, now: Instant) -> bool {
        let Some(tracked) = self.incarnations.get_mut(&incarnation) else { return false };
        tracked.open_streams.remove(&stream);
        let first = *tracked.ended.get_or_insert(now);
        tracked.is_contiguous &= is_contiguous && now.saturating_duration_since(first) <= AT_ONCE;
        if !tracked.is_member && tracked.open_streams.is_empty() {
            self.incarnations.remove(&incarnation);
            return false;
        }
        tracked.is_down && tracked.open_streams.is_empty() && tracked.is_in_doubt()
    }

    /// Incarnations that went down since the last check while they drained, without a goodbye.
    fn ended_while_draining(&self, members: &[GossipStatus]) -> Vec<u64> {
        let is_unfinished =
            |tracked: &TrackedIncarnation| tracked.is_met && !tracked.is_down && !tracked.has_left;
        let ended = members.iter().filter(|member| member.is_down && member.is_draining);
        let ended = ended.map(|member| member.incarnation);
        ended.filter(|incarnation| self.incarnations.get(incarnation).is_some_and(is_unfinished)).collect()
    }

    /// Takes the current members, and returns their changes since the last call.
    fn look(&mut self, members: &[GossipStatus], now: Instant) -> Vec<(u64, MembershipChange)> {
        let mut fates = Vec::new();
        for GossipStatus { incarnation, is_down, is_draining, is_seen_by_others, has_clients } in members {
            let tracked = self.incarnations.entry(*incarnation).or_default();
            (tracked.is_member, tracked.is_draining, tracked.has_clients) =
                (true, *is_draining, *has_clients);
            tracked.is_seen_by_others = *is_seen_by_others;
            match (tracked.is_down, *is_down) {
                // An incarnation with open streams is not in doubt yet, whatever gossip reports.
                (false, true) => {
                    tracked.is_contiguous &= tracked.ended.is_none_or(|at| now <= at + NOTICED_WITHIN);
                    let is_in_doubt = tracked.open_streams.is_empty() && tracked.is_in_doubt();
                    if is_in_doubt || !tracked.is_draining && !tracked.has_left {
                        fates.push((
                            *incarnation,
                            MembershipChange::Down { is_in_doubt, is_met: tracked.is_met },
                        ));
                    }
                }
                (true, false) => {
                    tracked.complete.clear();
                    fates.push((*incarnation, MembershipChange::Back));
                }
                _ => {}
            }
            tracked.is_down = *is_down;
        }
        self.incarnations.retain(|incarnation, tracked| {
            let is_member = members.iter().any(|member| member.incarnation == *incarnation);
            if tracked.is_member && !is_member {
                let is_in_doubt =
                    tracked.is_in_doubt() || !tracked.open_streams.is_empty() && !tracked.has_left;
                let is_reported =
                    tracked.is_down || tracked.is_draining || tracked.has_left || !tracked.is_met;
                fates.push((
                    *incarnation,
                    MembershipChange::Removed { is_reported, is_in_doubt, is_met: tracked.is_met },
                ));
            }
            (tracked.is_member, tracked.is_seen_by_others) =
                (is_member, is_member && tracked.is_seen_by_others);
            is_member || !tracked.open_streams.is_empty()
        });
        fates
    }
}

impl Routing {
    /// Takes the current members, without this node, and handles their failures. Called after [`Routing::set_peers`].
    pub fn update_node_failures(&self, members: &[GossipStatus]) {
        self.update_reachability(members);
        let mut node_failures = self.node_failures.lock();
        let ends = |(incarnation, tracked): (&u64, &TrackedIncarnation)| {
            (*incarnation, (tracked.troubled_for(), tracked.silent_since()))
        };
        let ends: HashMap<u64, (Duration, Option<Instant>)> =
            node_failures.incarnations.iter().map(ends).collect();
        let unfinished = node_failures.ended_while_draining(members);
        let fates = node_failures.look(members, Instant::now());
        // Peers report the incarnations that ended before this node began, with the time.
        if fates.iter().any(|(_, fate)| fate.is_met() && !fate.is_settled()) {
            node_failures.last = Some(Instant::now());
        }
        drop(node_failures);
        for node in unfinished.into_iter().filter_map(|incarnation| self.leaving.name_of(incarnation)) {
            tracing::warn!(%node, "peer went down while it drained");
        }
        let is_seen_by_others =
            |incarnation| members.iter().any(|one| one.incarnation == incarnation && one.is_seen_by_others);
        // An incarnation that peers see is alive, or was by their last report.
        let has_ended = |(incarnation, fate): &(u64, MembershipChange)| match fate {
            MembershipChange::Down { .. } => !is_seen_by_others(*incarnation),
            MembershipChange::Back => false,
            MembershipChange::Removed { .. } => true,
        };
        let ended: Vec<u64> =
            fates.iter().filter(|fate| has_ended(fate)).map(|(incarnation, _)| *incarnation).collect();
        self.record_ended(&ended);
        for (incarnation, fate) in fates {
            let (since, silent) = ends.get(&incarnation).copied().unwrap_or((NOTICED_WITHIN, None));
            match fate {
                MembershipChange::Down { is_in_doubt, is_met } => {
                    self.recheck_quota_slots(incarnation);
                    let mut unconfirmed =
                        self.unconfirmed_channels(incarnation, is_met, silent.filter(|_| !is_in_doubt));
                    if is_in_doubt {
                        self.hub.mark_in_doubt(incarnation, &unconfirmed);
                    }
                    if !self.recover(
                        (incarnation, since),
                        unconfirmed.clone(),
                        is_in_doubt,
                        LossEffect::NotifyAttached,
                    ) {
                        if is_in_doubt {
                            unconfirmed.extend(self.silent_channels(incarnation));
                        }
                        self.hub.report_node_failure(incarnation, &unconfirmed);
                    }
                }
                // Its pending items come first, and then its answer.
                MembershipChange::Back => {
                    self.incarnations.lock().is_back(incarnation);
                    self.send_interest_snapshot(incarnation);
                }
                MembershipChange::Removed { is_in_doubt, is_met, .. } => {
                    self.recheck_quota_slots(incarnation);
                    let unconfirmed =
                        self.unconfirmed_channels(incarnation, is_met, silent.filter(|_| !is_in_doubt));
                    let leaves = if is_in_doubt {
                        LossEffect::InvalidatePositions
                    } else {
                        LossEffect::NotifyAttached
                    };
                    if fate.is_settled() {
                        self.hub.abandon_where_in_doubt(incarnation);
                    } else if !self.recover((incarnation, since), unconfirmed.clone(), is_in_doubt, leaves) {
                        match leaves {
                            LossEffect::InvalidatePositions => {
                                self.hub.abandon_incarnation(incarnation, &unconfirmed)
                            }
                            LossEffect::NotifyAttached => {
                                self.hub.report_node_failure(incarnation, &unconfirmed)
                            }
                        }
                    }
                    for own in self.local_interest.lock().values_mut() {
                        own.confirmed.retain(|peer| *peer != incarnation);
                    }
                }
            }
        }
    }

    pub(super) fn mark_left(&self, incarnation: u64) {
        self.node_failures.lock().left(incarnation);
    }

    pub(super) fn record_stream_opened(&self, incarnation: u64, stream: u32) {
        self.node_failures.lock().stream_opened(incarnation, stream);
    }

    pub(super) fn record_stream_ended(&self, incarnation: u64, stream: u32, is_contiguous: bool) {
        let is_in_doubt =
            self.node_failures.lock().stream_ended(incarnation, stream, is_contiguous, Instant::now());
        if !self.is_up(incarnation) && !self.node_failures.lock().has_open_streams(incarnation) {
            self.skip_awaited_peer(incarnation);
            self.end_rounds(incarnation);
        }
        if is_in_doubt {
            let unconfirmed = self.unconfirmed_channels(incarnation, true, None);
            self.hub.mark_in_doubt(incarnation, &unconfirmed);
            let since = self.node_failures.lock().troubled_for(incarnation);
            if !self.recover((incarnation, since), unconfirmed, true, LossEffect::NotifyAttached) {
                // Subscribers of the other channels were told of the failure before.
                self.hub.report_node_failure_in(&self.silent_channels(incarnation));
            }
        }
    }

    /// Numbers of the channels that the incarnation forwards and in which none of its messages was received.
    fn silent_channels(&self, incarnation: u64) -> HashSet<u64> {
        self.hub.channels_silent_from(incarnation).iter().map(|channel| channel.number()).collect()
    }

    /// Numbers of the channels that the incarnation has never confirmed, since it was unreachable when clients attached. None for an
    /// incarnation that was never met. With `silent`, leaves out channels whose attach barrier opened later: no older position counts
    /// there.
    fn unconfirmed_channels(&self, incarnation: u64, is_met: bool, silent: Option<Instant>) -> HashSet<u64> {
        if !is_met {
            return HashSet::new();
        }
        let own = self.local_interest.lock();
        // A channel that has waited for the incarnation in vain does not count as contiguous anyway.
        let waits = |own: &LocalInterest| own.is_passed || own.waits.contains(&incarnation);
        let was_before = |own: &LocalInterest, silent| {
            own.let_in.is_some_and(|let_in| let_in < silent) || own.since < silent && !waits(own)
        };
        let may_miss = |own: &LocalInterest| silent.is_none_or(|silent| was_before(own, silent));
        let unconfirmed =
            own.iter().filter(|(_, own)| !own.confirmed.contains(&incarnation) && may_miss(own));
        unconfirmed.map(|(number, _)| *number).collect()
    }
}
