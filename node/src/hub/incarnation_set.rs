//! A small set of incarnations of other nodes, for most channels empty.

use std::ops::Deref;

/// A set without duplicates. As large as a pointer while empty.
#[derive(Debug, Default)]
#[expect(clippy::box_collection, reason = "every channel has room for it, and hardly any has a run")]
pub(super) struct IncarnationSet(Option<Box<Vec<u64>>>);

impl IncarnationSet {
    pub(super) fn add(&mut self, incarnation: u64) {
        if !self.contains(&incarnation) {
            self.0.get_or_insert_default().push(incarnation);
        }
    }

    pub(super) fn remove(&mut self, incarnation: u64) {
        if let Some(incarnations) = &mut self.0 {
            incarnations.retain(|one| *one != incarnation);
        }
        self.0.take_if(|incarnations| incarnations.is_empty());
    }
}

impl Deref for IncarnationSet {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        self.0.as_deref().map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incarnation_set_has_each_once_and_no_memory_if_empty() {
        let mut set = IncarnationSet::default();
        for incarnation in [7, 8, 7] {
            set.add(incarnation);
        }
        assert_eq!(*set, [7, 8]);
        set.remove(9);
        set.remove(7);
        assert_eq!(*set, [8]);
        set.remove(8);
        assert!(set.is_empty() && set.0.is_none());
        assert_eq!(size_of::<IncarnationSet>(), size_of::<usize>());
    }
}
