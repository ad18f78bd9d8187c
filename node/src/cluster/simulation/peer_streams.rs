//! Events of the simulated network on the streams between nodes.

use std::time::Duration;

use super::SimWorld;
use crate::cluster::link::StreamEnd;

const SHORT_CUT_MS: u64 = 1_000;
/// Long enough that nodes take each other for down, and members leave.
const LONG_CUT_MS: u64 = 12_000;

impl SimWorld {
    fn pair(&mut self) -> Option<(usize, usize)> {
        let from = self.any_alive();
        let others: Vec<usize> = self.nodes[from].known.iter().copied().collect();
        let to = *others.get(self.random.usize(..others.len().max(1)))?;
        Some((from, to))
    }

    pub(super) fn move_stream(&mut self) {
        let Some((from, to)) = self.pair() else { return };
        let (stream, what) = (self.random.usize(..self.stream_count), self.random.u8(..3));
        self.move_one(from, to, stream, what);
    }

    /// Moves everything that can move between live nodes.
    pub(super) fn move_all(&mut self) {
        while !self.late.is_empty() {
            self.late_arrival();
        }
        let alive = self.alive();
        for from in alive.iter().copied() {
            for to in alive.iter().copied().filter(|to| *to != from) {
                for stream in 0..self.stream_count {
                    (0..3).for_each(|what| self.move_one(from, to, stream, what));
                }
            }
        }
    }

    fn move_one(&mut self, from: usize, to: usize, stream: usize, what: u8) {
        let Some(link) = self.nodes[from].links.link(self.nodes[to].peer.incarnation) else { return };
        if !link.is_open(stream) {
            let passes = self.passes(from, to) && self.passes(to, from);
            if passes && self.nodes[to].is_alive {
                link.open(stream, &self.nodes[from].side(), &self.nodes[to].side());
            }
            return;
        }
        match what {
            0 if !link.send(stream) => {
                let ending = if self.passes(from, to) { StreamEnd::Ended } else { StreamEnd::Silent };
                self.end_stream(from, to, stream, ending);
            }
            1 if self.passes(from, to)
                && self.nodes[to].is_alive
                && !link.arrive(stream, &*self.nodes[to].routing) =>
            {
                self.cut_one(from, to, stream);
            }
            2 if self.passes(to, from) => link.confirm(stream),
            _ => {}
        }
    }

    pub(super) fn cut_stream(&mut self) {
        let Some((from, to)) = self.pair() else { return };
        let stream = self.random.usize(..self.stream_count);
        self.cut_one(from, to, stream);
    }

    pub(super) fn cut_one(&mut self, from: usize, to: usize, stream: usize) {
        self.end_stream(from, to, stream, StreamEnd::Silent);
    }

    /// Ends a stream. Frames of a sender that goes silent may never arrive.
    pub(super) fn end_stream(&mut self, from: usize, to: usize, stream: usize, ending: StreamEnd) {
        let Some(link) = self.nodes[from].links.link(self.nodes[to].peer.incarnation) else { return };
        let Some(mut late) = link.cut(stream, &self.nodes[from].side(), ending) else { return };
        // Frames on their way may be read after the sender is gone.
        if self.random.bool() {
            return self.late.push(late);
        }
        if ending == StreamEnd::Silent {
            late.drop_all();
        }
        if self.nodes[to].is_alive {
            while late.arrive(&*self.nodes[to].routing) {}
        }
    }

    pub(super) fn late_arrival(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let index = self.random.usize(..self.late.len());
        let to = self.nodes.iter().find(|node| node.peer.incarnation == self.late[index].to());
        let is_done = to.is_none_or(|to| !to.is_alive || !self.late[index].arrive(&*to.routing));
        if is_done {
            self.late.swap_remove(index);
        }
    }

    pub(super) fn change_network(&mut self) {
        let (from, to) = (self.any_alive(), self.any_alive());
        let is_long = self.has_long_cuts && self.random.u8(..5) == 0;
        let cut_ms = self.random.u64(..if is_long { LONG_CUT_MS } else { SHORT_CUT_MS });
        if from != to {
            let until = self.now + Duration::from_millis(cut_ms);
            self.cut.insert((from, to), until);
            if self.random.bool() {
                self.cut.insert((to, from), until);
            }
        }
    }

    pub(super) fn passes(&self, from: usize, to: usize) -> bool {
        !self.cut.contains_key(&(from, to))
    }
}
