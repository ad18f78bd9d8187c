//! The queues of accounts: one row for each account, which changes by its revision.

use futures_util::TryStreamExt as _;

use super::values::{conditional, natural, number};
use super::{Shared, failed};
use crate::model::AccountId;
use crate::origin::history::{StoreError, StoredQueues};

pub(super) async fn put(shared: &Shared, row: StoredQueues) -> Result<bool, StoreError> {
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

/// Puts the queues of another store, of which the revisions are counted apart. An account that has queues here keeps them.
pub(super) async fn copy(shared: &Shared, row: &StoredQueues) -> Result<(), StoreError> {
    put(shared, StoredQueues { revision: 1, ..row.clone() }).await.map(drop)
}

/// Every row, in no order.
pub(super) async fn all(shared: &Shared) -> Result<Vec<StoredQueues>, StoreError> {
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
