//! Revocations of tokens: one row for each key and clientId, and one for all tokens of the key.

use std::collections::HashMap;

use futures_util::TryStreamExt as _;

use super::values::{natural, number, ttl_s, written_at};
use super::{ScyllaShared, failed};
use crate::model::{ClientId, KeyName, Revocation};
use crate::origin::history::StoreError;

/// Writes a revocation. Its own time is the write time, so that the latest one counts and not the last written.
pub(super) async fn write(shared: &ScyllaShared, revocation: Revocation) -> Result<(), StoreError> {
    let Revocation { key_name, client_id, issued_before_ms } = revocation;
    let kept_ms = shared.options.revocation_kept_ms;
    let left_ms = issued_before_ms.saturating_add(kept_ms).saturating_sub(shared.time.now_ms());
    // At least the full time, in case the clock that set the revocation's time is behind.
    let ttl = ttl_s(left_ms.max(kept_ms), 0).unwrap_or(i32::MAX);
    let database = shared.database();
    let client_id = client_id.as_ref().map_or("", ClientId::as_str);
    let values = (&*key_name, client_id, number(issued_before_ms), ttl, written_at(issued_before_ms));
    let written = database.session.execute_unpaged(&database.statements.insert_revocation, values).await;
    written.map(drop).map_err(failed)
}

/// Reads all rows, except those of clientIds that the row of their key makes redundant.
pub(super) async fn all(shared: &ScyllaShared) -> Result<Vec<Revocation>, StoreError> {
    let mut all = rows(shared).await?;
    let of_keys: HashMap<KeyName, u64> = all
        .iter()
        .filter(|revocation| revocation.client_id.is_none())
        .map(|revocation| (revocation.key_name.clone(), revocation.issued_before_ms))
        .collect();
    all.retain(|revocation| {
        let of_key = of_keys.get(&revocation.key_name).copied().unwrap_or(0);
        revocation.client_id.is_none() || revocation.issued_before_ms > of_key
    });
    Ok(all)
}

async fn rows(shared: &ScyllaShared) -> Result<Vec<Revocation>, StoreError> {
    let database = shared.database();
    let found = database.session.execute_iter(database.statements.revocations.clone(), ()).await;
    let mut found = found.map_err(failed)?.rows_stream::<(String, String, i64)>().map_err(failed)?;
    let mut rows = Vec::new();
    while let Some((key_name, client_id, issued_before_ms)) = found.try_next().await.map_err(failed)? {
        let client_id = (!client_id.is_empty()).then(|| ClientId::stored(&client_id));
        let issued_before_ms = natural(issued_before_ms);
        rows.push(Revocation { key_name: key_name.as_str().into(), client_id, issued_before_ms });
    }
    Ok(rows)
}
