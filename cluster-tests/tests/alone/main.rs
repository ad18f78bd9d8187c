//! Tests of the memory that a node takes, and cases that give it little time. They run one at a time, while no others do.

mod autobahn;
mod memory;
