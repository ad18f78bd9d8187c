//! Tests that need the machine for themselves: memory of a node, promised times, and cases that overload a node. They
//! run one at a time.

mod autobahn;
mod memory;
mod promised_times;
