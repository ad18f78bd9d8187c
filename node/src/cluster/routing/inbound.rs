//! Items from peers, each passed to the part of the routing that handles it.

use super::Routing;
use crate::cluster::inbound::{
    Inbound, InterestMessage, Peer, PeerAnswer, PeerRequest, PeerSessionMessage, PresenceSyncMessage,
    TenantCountMessage,
};
use crate::model::{ForwardedMessages, ForwardedPresence, IdScope, RemoteMembersPage, Stamp, StampedIds};

impl Inbound for Routing {
    fn forwarded(&self, _from: &Peer, forwarded: ForwardedMessages) {
        self.taken.increment(1);
        self.hub.deliver_forwarded(forwarded);
    }

    fn batch_received(&self, bytes: usize) {
        self.hub.record_peer_batch(bytes);
    }

    fn presence_changed(&self, _from: &Peer, forwarded: ForwardedPresence) {
        self.hub.apply_remote_change(forwarded);
    }

    fn presence_members_received(&self, from: &Peer, number: u64, members: RemoteMembersPage) {
        self.take_members(from.incarnation, number, members);
    }

    fn presence_sync_received(&self, from: &Peer, message: PresenceSyncMessage) {
        self.take_presence_sync(from.incarnation, message);
    }

    fn session_message_received(&self, from: &Peer, message: PeerSessionMessage) {
        self.take_session_message(from.incarnation, message);
    }

    fn interest(&self, from: &Peer, interest: InterestMessage) {
        match interest {
            InterestMessage::Added { key, number, round, sequence } => {
                self.hub.extend_contiguous(&key, Stamp { incarnation: from.incarnation, sequence });
                self.add_peer_interest(from.incarnation, key, number, round);
            }
            InterestMessage::Removed { key } => {
                self.interested_peers.remove_if_mut(&key, |_, wanting| {
                    wanting.retain(|peer| *peer != from.incarnation);
                    wanting.is_empty()
                });
            }
            InterestMessage::SnapshotEnd { epoch, streams } => {
                self.take_snapshot_end(from.incarnation, epoch, streams)
            }
            InterestMessage::SnapshotRequest => self.send_interest_snapshot(from.incarnation),
            InterestMessage::Forwarding { key, number, sequence, round, retired } => {
                self.forwarding_confirmed(from.incarnation, &key, number, (sequence, round), retired);
            }
            InterestMessage::Goodbye { streams, is_all } => {
                self.peer_stream_left(from.incarnation, streams, is_all)
            }
            InterestMessage::IncarnationsEnded { incarnations } => self.take_ended(&incarnations),
        }
    }

    fn ids_settled(&self, _from: &Peer, scope: IdScope, ids: StampedIds) {
        self.take_settled(scope, ids);
    }

    fn request_received(&self, from: &Peer, number: u64, request: Option<PeerRequest>) {
        self.serve_request(from.incarnation, number, request);
    }

    fn answer_received(&self, from: &Peer, number: u64, answer: PeerAnswer) {
        self.take_answer(from.incarnation, number, answer);
    }

    fn tenants(&self, from: &Peer, tenants: TenantCountMessage) {
        self.take_tenants(from.incarnation, tenants);
    }

    fn stream_opened(&self, from: &Peer, stream: u32) {
        self.record_stream_opened(from.incarnation, stream);
        self.reach_changed.notify_waiters();
    }

    fn stream_ended(&self, from: &Peer, stream: u32, is_contiguous: bool) {
        self.record_stream_ended(from.incarnation, stream, is_contiguous);
    }

    fn continuity_lost(&self, from: &Peer) {
        self.tenants_lost(from.incarnation);
        // The lost items may include interest of the peer, too.
        if let Some(wants) = self.peers.write().get_mut(&from.incarnation) {
            wants.is_known = false;
        }
        self.count_known();
        for own in self.local_interest.lock().values_mut() {
            own.confirmed.retain(|peer| *peer != from.incarnation);
        }
        self.hub.mark_peer_loss(from.incarnation);
        self.send(from.incarnation, 0, &InterestMessage::SnapshotRequest);
        self.presence_lost(from.incarnation);
        // The answers carry the peer's sequence in each channel.
        self.send_interest_snapshot(from.incarnation);
    }

    fn link(&self, to: &Peer, up: bool) {
        self.count_known();
        self.reach_changed.notify_waiters();
        if up {
            self.node_failures.lock().linked(to.incarnation, true);
            self.tenants_linked(to.incarnation);
            self.send_revocations(to.incarnation);
            self.announce_ended(to.incarnation);
            // The peer may have sent its interest before it was known here as a member.
            if self.peers.read().get(&to.incarnation).is_some_and(|wants| !wants.is_known) {
                self.send(to.incarnation, 0, &InterestMessage::SnapshotRequest);
            }
            self.presence_linked(to.incarnation);
            return self.send_interest_snapshot(to.incarnation);
        }
        self.drop_expected_answers(to.incarnation, None);
        self.unlinked(to.incarnation);
    }
}
