//! The end that takes: what comes is read, checked and confirmed as by a node, and then counted and dropped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use fanfare::cluster::inbound::{
    Answer, ConnectionSaid, Inbound, Interest, Peer, PresenceSaid, Request, Tenants,
};
use fanfare::cluster::link::{LinkSettings, Links};
use fanfare::model::{Forwarded, ForwardedPresence, ToldMembers};
use fanfare::tasks::Tasks;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::End;
use crate::Result;

/// Of this end; the other one is given it.
pub const INCARNATION: u64 = 2;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    pub end: End,
}

/// Listens on a free port, which is the one line on stdout, until stdin ends. Then it says how many messages came.
pub fn serve(runtime: &Runtime, options: &Options) -> Result<()> {
    let tls = options.end.tls()?;
    let counted = Arc::new(Counted::default());
    let own = Peer { node_id: "sink".into(), incarnation: INCARNATION };
    let tasks = Arc::new(Tasks::new(runtime.handle().clone()));
    let inbound = Arc::clone(&counted) as Arc<dyn Inbound>;
    let links = Links::new(own, tls, inbound, tasks, LinkSettings::default());
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
struct Counted {
    messages: AtomicU64,
}

impl Inbound for Counted {
    fn batch_came(&self, _bytes: usize) {}

    fn forwarded(&self, _from: &Peer, forwarded: Forwarded) {
        self.messages.fetch_add(forwarded.messages.len() as u64, Ordering::Relaxed);
    }

    fn interest(&self, _from: &Peer, _interest: Interest) {}

    fn asked(&self, _from: &Peer, _number: u64, _request: Option<Request>) {}

    fn answered(&self, _from: &Peer, _number: u64, _answer: Answer) {}

    fn connection_said(&self, _from: &Peer, _said: ConnectionSaid) {}

    fn tenants(&self, _from: &Peer, _tenants: Tenants) {}

    fn presence_changed(&self, _from: &Peer, _forwarded: ForwardedPresence) {}

    fn presence_told(&self, _from: &Peer, _number: u64, _members: ToldMembers) {}

    fn presence_said(&self, _from: &Peer, _said: PresenceSaid) {}

    fn continuity_lost(&self, _from: &Peer) {}

    fn link(&self, _to: &Peer, _up: bool) {}
}
