//! Tests of the memory that a node takes. They run one at a time, while no others do.

mod memory;
