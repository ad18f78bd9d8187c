//! Tests of the memory that a node takes, of times that hold for nodes with a machine of their own, and cases
//! that give a node little time. They run one at a time, while no others do.

mod autobahn;
mod memory;
mod promised_times;
