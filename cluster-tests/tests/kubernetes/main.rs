//! Nodes in the pods of Kubernetes. A cluster takes half a gigabyte of memory, and a core while it starts, so few of
//! these tests run at once.

mod chart;
mod client_addresses;
mod faults;
mod pods_run;
mod release;
