//! The receiving end of a link: it reads, checks and acks messages as a node does, then counts and drops them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use fanfare::cluster::inbound::{
    Inbound, InterestMessage, Peer, PeerAnswer, PeerRequest, PeerSessionMessage, PresenceSyncMessage,
    TenantCountMessage,
};
use fanfare::cluster::link::{GrpcPeerLinks, LinkSettings};
use fanfare::model::{ForwardedMessages, ForwardedPresence, RemoteMembersPage};
use fanfare::tasks::Tasks;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::End;
use crate::Result;

/// Incarnation of the sink, which the source must know to open the link.
pub const INCARNATION: u64 = 2;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    pub end: End,
}

/// Listens on a free port until stdin ends. The address is the first line on stdout, the number of received messages
/// the second.
pub fn serve(runtime: &Runtime, options: &Options) -> Result<()> {
    let tls = options.end.tls()?;
    let counted = Arc::new(MessageCounter::default());
    let own = Peer { node_id: "sink".into(), incarnation: INCARNATION };
    let tasks = Arc::new(Tasks::new(runtime.handle().clone()));
    let inbound = Arc::clone(&counted) as Arc<dyn Inbound>;
    let links = GrpcPeerLinks::new(own, tls, inbound, tasks, LinkSettings::default());
    let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0)))?;
    println!("{}", listener.local_addr()?);
    {
        let _in_runtime = runtime.enter();
        links.listen(listener);
    }
    io::copy(&mut io::stdin(), &mut io::sink())?;
    println!("{}", counted.messages.load(Ordering::Relaxed));
    Ok(())
}

#[derive(Default)]
struct MessageCounter {
    messages: AtomicU64,
}

impl Inbound for MessageCounter {
    fn batch_received(&self, _bytes: usize) {}

    fn forwarded(&self, _from: &Peer, forwarded: ForwardedMessages) {
        self.messages.fetch_add(forwarded.messages.len() as u64, Ordering::Relaxed);
    }

    fn interest(&self, _from: &Peer, _interest: InterestMessage) {}

    fn request_received(&self, _from: &Peer, _number: u64, _request: Option<PeerRequest>) {}

    fn answer_received(&self, _from: &Peer, _number: u64, _answer: PeerAnswer) {}

    fn session_message_received(&self, _from: &Peer, _said: PeerSessionMessage) {}

    fn tenants(&self, _from: &Peer, _tenants: TenantCountMessage) {}

    fn presence_changed(&self, _from: &Peer, _forwarded: ForwardedPresence) {}

    fn presence_members_received(&self, _from: &Peer, _number: u64, _members: RemoteMembersPage) {}

    fn presence_sync_received(&self, _from: &Peer, _said: PresenceSyncMessage) {}

    fn continuity_lost(&self, _from: &Peer) {}

    fn link(&self, _to: &Peer, _up: bool) {}
}
