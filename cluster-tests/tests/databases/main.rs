//! Nodes over databases of the tests' own, which the tests stop, stall and kill.
//!
//! Each database takes half a gigabyte of memory, and a core for its first seconds, so few of these tests run at once.

mod partition_shared_store;
mod schema_apply;
mod scylla_failures;
mod scylla_logs;
mod scylla_users;
