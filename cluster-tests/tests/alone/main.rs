//! What a node takes of its machine. These tests run one at a time, after all others.

mod memory;
