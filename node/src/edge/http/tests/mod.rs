//! Tests of the router as a client sees it, over the real directory, authenticator, publisher and embedded store.

mod credentials;
mod fixture;
mod history;
mod listings;
mod metrics;
mod order;
mod publish;
mod refusing_store;
mod token;
