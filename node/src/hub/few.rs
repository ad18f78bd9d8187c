//! Some runs of other nodes, of which a channel mostly has none.

use std::ops::Deref;

/// Each once. As large as a pointer while there is none.
#[derive(Debug, Default)]
#[expect(clippy::box_collection, reason = "every channel has room for it, and hardly any has a run")]
pub(super) struct Few(Option<Box<Vec<u64>>>);

impl Few {
    pub(super) fn add(&mut self, run: u64) {
        if !self.contains(&run) {
            self.0.get_or_insert_default().push(run);
        }
    }

    pub(super) fn remove(&mut self, run: u64) {
        if let Some(runs) = &mut self.0 {
            runs.retain(|one| *one != run);
        }
        self.0.take_if(|runs| runs.is_empty());
    }
}

impl Deref for Few {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        self.0.as_deref().map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_there_once_and_none_takes_no_room() {
        let mut few = Few::default();
        for run in [7, 8, 7] {
            few.add(run);
        }
        assert_eq!(*few, [7, 8]);
        few.remove(9);
        few.remove(7);
        assert_eq!(*few, [8]);
        few.remove(8);
        assert!(few.is_empty() && few.0.is_none());
        assert_eq!(size_of::<Few>(), size_of::<usize>());
    }
}
