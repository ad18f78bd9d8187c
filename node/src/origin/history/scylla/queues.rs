//! The queues of accounts: one row for each account, changed only from the expected revision.

use std::collections::HashMap;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use super::values::{conditional, natural, number};
use super::{ScyllaShared, failed};
use crate::model::AccountId;
use crate::origin::history::{StoreError, StoredQueues};

/// Rows that are read concurrently.
const READS: usize = 16;

pub(super) async fn put(shared: &ScyllaShared, row: StoredQueues) -> Result<bool, StoreError> {
    let StoredQueues { account, revision, definitions } = row;
    let database = shared.database();
    let (session, statements) = (&database.session, &database.statements);
    let (account, definitions) = (account.as_str(), &*definitions);
    let answer = if revision == 1 {
        conditional(session, &statements.insert_queues, (account, number(revision), definitions)).await?
    } else {
        let values = (number(revision), definitions, account, number(revision.saturating_sub(1)));
        conditional(session, &statements.update_queues, values).await?
    };
    Ok(answer.applied)
}

/// Copies queues from another store, whose revisions do not apply here. An account that already has queues here keeps them.
pub(super) async fn copy(shared: &ScyllaShared, row: &StoredQueues) -> Result<(), StoreError> {
    put(shared, StoredQueues { revision: 1, ..row.clone() }).await.map(drop)
}

/// Reads the rows whose revision differs from the known one, in no order. If none is known, one read returns all of them; else only
/// changed rows are read.
pub(super) async fn changed(
    shared: &ScyllaShared,
    known: &HashMap<AccountId, u64>,
) -> Result<Vec<StoredQueues>, StoreError> {
    if known.is_empty() {
        return all(shared).await;
    }
    let database = shared.database();
    let found = database.session.execute_iter(database.statements.queue_revisions.clone(), ()).await;
    let mut found = found.map_err(failed)?.rows_stream::<(String, i64)>().map_err(failed)?;
    let mut changed = Vec::new();
    while let Some((account, revision)) = found.try_next().await.map_err(failed)? {
        let account = AccountId::new(&account);
        if known.get(&account) != Some(&natural(revision)) {
            changed.push(one(shared, account));
        }
    }
    let rows = stream::iter(changed).buffer_unordered(READS).try_collect::<Vec<_>>().await?;
    Ok(rows.into_iter().flatten().collect())
}

async fn all(shared: &ScyllaShared) -> Result<Vec<StoredQueues>, StoreError> {
    let database = shared.database();
    let found = database.session.execute_iter(database.statements.account_queues.clone(), ()).await;
    let mut found = found.map_err(failed)?.rows_stream::<(String, i64, String)>().map_err(failed)?;
    let mut rows = Vec::new();
    while let Some((account, revision, definitions)) = found.try_next().await.map_err(failed)? {
        let account = AccountId::new(&account);
        rows.push(StoredQueues { account, revision: natural(revision), definitions: definitions.into() });
    }
    Ok(rows)
}

async fn one(shared: &ScyllaShared, account: AccountId) -> Result<Option<StoredQueues>, StoreError> {
    let database = shared.database();
    let answer = database.session.execute_unpaged(&database.statements.queues_of, (account.as_str(),)).await;
    let rows = answer.map_err(failed)?.into_rows_result().map_err(failed)?;
    let row = rows.maybe_first_row::<(i64, String)>().map_err(failed)?;
    Ok(row.map(|(revision, definitions)| StoredQueues {
        account,
        revision: natural(revision),
        definitions: definitions.into(),
    }))
}
