//! Trimming: a target beyond its bounds loses its oldest events and dead letters.

use std::sync::Arc;

use fjall::OwnedWriteBatch;

use super::{CommitEffects, OutboxWriter};
use crate::origin::history::StoreError;
use crate::origin::outbox::event::OutboxEvent;
use crate::origin::outbox::store::DeadLetter;
use crate::origin::outbox::{TargetId, keys};

/// Events of a full target that one commit moves to the dead letters.
const TRIM_MAX: usize = 2_000;
/// Fraction of its bytes that a full target loses at once, so that a batch which is read afterwards still exists when it is fixed.
const TRIM_PART: u64 = 64;

impl OutboxWriter {
    /// Moves the oldest events of full targets to the dead letters, and drops the oldest dead letters of targets with too many. Events
    /// from `first_new` on belong to this group, and are in no table yet.
    pub(super) fn trim(
        &mut self,
        batch: &mut OwnedWriteBatch,
        first_new: u64,
        effects: &mut CommitEffects,
    ) -> Result<(), StoreError> {
        let touched: Vec<TargetId> = effects.changes.keys().cloned().collect();
        for target in touched {
            let depth = self.depths.of(&target);
            let change = effects.change(&target);
            let over = depth.bytes.saturating_add_signed(change.bytes).saturating_sub(self.bounds.bytes);
            if over > 0 {
                let over = over + self.bounds.bytes / TRIM_PART;
                self.trim_waiting(batch, &target, (over, first_new), effects)?;
            }
            let change = effects.change(&target);
            let dead = depth.dead_bytes.saturating_add_signed(change.dead_bytes);
            let over = dead.saturating_sub(self.bounds.dead_bytes);
            if over > 0 {
                self.trim_dead(batch, &target, over, effects)?;
            }
        }
        Ok(())
    }

    fn trim_waiting(
        &mut self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        (over, first_new): (u64, u64),
        effects: &mut CommitEffects,
    ) -> Result<(), StoreError> {
        let from = self.oldest.get(target).copied().unwrap_or(0);
        let (mut freed, mut events, mut oldest) = (0, Vec::new(), None);
        for row in self.tables.events.keyspace().range(keys::sequence(from)..) {
            let (key, value) = row.into_inner().map_err(StoreError::failed)?;
            let Some(sequence) = keys::parse_sequence(&key) else { continue };
            if freed >= over || events.len() >= TRIM_MAX {
                oldest = Some(sequence);
                break;
            }
            // An event that cannot be read does not block others; the turn of its channel reports it.
            let Ok(event) = OutboxEvent::decode(&value) else { continue };
            if event.addressee(target).is_none()
                || !self.tables.is_waiting(target, &event.channel, sequence)?
            {
                continue;
            }
            // A fixed batch may be under way, and each attempt has the same events.
            let fixed = self.tables.fixed(target, &event.channel)?.map(|fixed| fixed.last);
            let fixing = effects.fixed.get(&(target.clone(), event.channel.clone())).copied();
            // Events of a fixed batch are skipped: they end when the batch is settled.
            if fixed.max(fixing).is_some_and(|last| sequence <= last) {
                continue;
            }
            freed += value.len() as u64;
            effects.trimmed.insert((target.clone(), event.channel.clone()));
            events.push((sequence, Arc::new(event)));
        }
        self.oldest.insert(target.clone(), oldest.unwrap_or(first_new));
        self.settle(batch, target, &events, Some("the outbox of this target is full"), effects)
    }

    fn trim_dead(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        over: u64,
        effects: &mut CommitEffects,
    ) -> Result<(), StoreError> {
        let mut freed = 0;
        for row in self.tables.dead.keyspace().prefix(keys::target(target)).take(TRIM_MAX) {
            if freed >= over {
                break;
            }
            let (key, value) = row.into_inner().map_err(StoreError::failed)?;
            let (Some((_, sequence)), Some(dead)) = (keys::parse_dead(&key), DeadLetter::decode(&value))
            else {
                continue;
            };
            if self.remove_dead(batch, target, sequence, effects)? {
                freed += u64::from(dead.bytes);
                effects.dropped += 1;
            }
        }
        Ok(())
    }
}
