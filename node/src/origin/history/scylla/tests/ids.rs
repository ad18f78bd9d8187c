//! Ids given by clients that several nodes claim, or that nothing came of.

use super::super::ids as given_ids;
use super::*;

fn publish_own(store: &Scylla, key: &ChannelKey, sequence: u64) -> Result<(), StoreError> {
    let (send, receive) = mpsc::channel();
    let done = Box::new(move |result| send.send(result).expect("test waits"));
    let published = with_ids(key, store.shared.clock.now_ms(), &[(sequence, "own")]);
    store.append(published, Some(72), done);
    receive.recv_timeout(PATIENCE).expect("answered")
}

#[test]
fn an_id_whose_node_is_gone_is_taken_over_and_its_late_row_does_not_count() {
    let Some(place) = Keyspace::new() else { return };
    let clock = Clock::manual(Clock::system().now_ms());
    let [one, other] = [(), ()].map(|()| place.open_with(Keyspace::options(), &clock));
    let key = channel("acme", "a");
    assert_eq!(find(&one, &key, "own"), None);
    assert_eq!(find(&other, &key, "own"), None, "the first has claimed it, and nothing came of it");
    assert!(publish_own(&one, &key, 1).is_err(), "it is not its own any more");
    publish_own(&other, &key, 2).expect("stored");
    let stored = Some(Stamp { incarnation: 0xfa_fa, sequence: 2 });
    assert_eq!((find(&one, &key, "own"), find(&other, &key, "own")), (stored, stored));
    assert_eq!(sequences(&wait(one.read(query(&key))).expect("read")), [2]);

    // A claim with a stamp, whose row is still on its way when the id is asked for elsewhere.
    let late = channel("acme", "late");
    assert_eq!(find(&one, &late, "own"), None);
    publish_own(&one, &late, 7).expect("stored");
    let keyspace = &place.connection.keyspace;
    let position = wait(one.read(query(&late))).expect("read").rows[0].position;
    let Position { timestamp_ms, .. } = position;
    let names =
        format!("account = 'acme' AND channel = 'late' AND kind = 0 AND day = {}", timestamp_ms / DAY_MS);
    let database = one.shared.database();
    runtime().block_on(async {
        // As if it had not come yet: nothing of it is there, and no later time than its own was used.
        let removed = format!(
            "DELETE FROM {keyspace}.history USING TIMESTAMP {} WHERE {names} AND bucket = 0",
            timestamp_ms * 1_000
        );
        database.session.query_unpaged(removed, ()).await.expect("removed");
    });
    let asked = look_up(&other, &late, "own");
    assert!(asked.recv_timeout(Duration::from_secs(2)).is_err(), "its owner may still acknowledge it");
    clock.raise(timestamp_ms + 20_000 + 60_000);
    let found = asked.recv_timeout(PATIENCE).expect("answered").expect("looked up");
    assert_eq!(found, [None], "there is no row");
    let left = runtime().block_on(async {
        let (scope, asked) = (
            scope(&late),
            format!(
                "SELECT sequence, bucket FROM {keyspace}.message_ids WHERE account = ? \
            AND channel = ? AND key_name = ? AND client_id = ? AND id = ?"
            ),
        );
        let found =
            database.session.query_unpaged(asked, given_ids::names(&scope, "own")).await.expect("asked");
        found.into_rows_result().expect("rows").single_row::<(Option<i64>, Option<i32>)>().expect("the claim")
    });
    assert_eq!(left, (Some(7), Some(-2)), "where that could not be closed it is closed the next time");
    runtime().block_on(async {
        let (t, s, i) = values::position_values(position);
        let come = format!(
            "INSERT INTO {keyspace}.history (account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation, \
             record) VALUES ('acme', 'late', 0, {}, 0, {t}, {s}, {i}, 'late') USING TIMESTAMP {}",
            timestamp_ms / DAY_MS,
            timestamp_ms * 1_000 + 1
        );
        database.session.query_unpaged(come, ()).await.expect("written");
    });
    assert!(wait(one.read(query(&late))).expect("read").rows.is_empty(), "it has come too late");
    publish_own(&other, &late, 8).expect("stored");
    assert_eq!(sequences(&wait(one.read(query(&late))).expect("read")), [8]);
}

#[test]
fn a_stamp_that_was_given_up_does_not_count_when_it_comes_late() {
    let Some(place) = Keyspace::new() else { return };
    let store = place.open_with(Keyspace::options(), &Clock::system());
    let key = channel("acme", "a");
    let (database, keyspace) = (store.shared.database(), &place.connection.keyspace);
    let named = "account = ? AND channel = ? AND key_name = ? AND client_id = ? AND id = 'own'";
    let scope = scope(&key);
    let (account, channel, key_name, client_id, _) = given_ids::names(&scope, "own");
    let names = (account, channel, key_name, client_id);
    assert_eq!(find(&store, &key, "own"), None);
    let first: i64 = runtime().block_on(async {
        let asked = format!("SELECT owner FROM {keyspace}.message_ids WHERE {named}");
        let found = database.session.query_unpaged(asked, names).await.expect("asked");
        found.into_rows_result().expect("rows").single_row::<(i64,)>().expect("the claim").0
    });
    // The store was not answered, so the client tries it again.
    assert_eq!(find(&store, &key, "own"), None);
    publish_own(&store, &key, 2).expect("stored");
    let late = format!("UPDATE {keyspace}.message_ids SET sequence = 1 WHERE {named} IF owner = {first}");
    runtime().block_on(database.session.query_unpaged(late, names)).expect("answered");
    let stored = Some(Stamp { incarnation: 0xfa_fa, sequence: 2 });
    assert_eq!(find(&store, &key, "own"), stored, "it names what was acknowledged");
}

#[test]
fn each_id_of_a_publish_is_found_in_whichever_partition_its_row_is() {
    let Some(place) = Keyspace::new() else { return };
    let clock = Clock::system();
    let options = || ScyllaOptions { partition_rows: 2, ..Keyspace::options() };
    let [one, other] = [(), ()].map(|()| place.open_with(options(), &clock));
    let key = channel("acme", "a");
    let ids = ["first", "second", "third"];
    ids.iter().for_each(|id| assert_eq!(find(&one, &key, id), None));
    let given: Vec<_> = (1..).zip(ids).collect();
    let (send, receive) = mpsc::channel();
    let done = Box::new(move |result| send.send(result).expect("test waits"));
    one.append(with_ids(&key, clock.now_ms(), &given), Some(72), done);
    receive.recv_timeout(PATIENCE).expect("answered").expect("stored");
    for (sequence, id) in given {
        assert_eq!(find(&other, &key, id), Some(Stamp { incarnation: 0xfa_fa, sequence }), "{id}");
    }
}

#[test]
fn an_id_is_taken_over_once_its_row_was_missed_for_as_long_as_a_store_may_take_whatever_the_clocks_say() {
    let Some(place) = Keyspace::new() else { return };
    let clock = Clock::manual(Clock::system().now_ms());
    let one = place.open_with(Keyspace::options(), &clock);
    let key = channel("acme", "a");
    assert_eq!(find(&one, &key, "own"), None);
    publish_own(&one, &key, 1).expect("stored");
    let stored_ms = clock.now_ms();
    let position = wait(one.read(query(&key))).expect("read").rows[0].position;
    let (timestamp_ms, sequence, incarnation) = values::position_values(position);
    let removed = format!(
        "DELETE FROM {}.history USING TIMESTAMP {} WHERE account = 'acme' AND channel = 'a' AND kind = 0 AND day = {} \
         AND bucket = 0 AND timestamp_ms = {timestamp_ms} AND sequence = {sequence} AND incarnation = {incarnation}",
        place.connection.keyspace,
        stored_ms * 1_000,
        stored_ms / DAY_MS
    );
    runtime().block_on(one.shared.database().session.query_unpaged(removed, ())).expect("removed");
    // Its clock is half a minute ahead, so by that nobody could acknowledge the row any more.
    let ahead = Clock::manual(stored_ms + 30_000);
    let other =
        place.open_with(ScyllaOptions { wait: Duration::from_secs(4), ..Keyspace::options() }, &ahead);
    let begun = std::time::Instant::now();
    let asked = || look_up(&other, &key, "own").recv_timeout(PATIENCE).expect("answered");
    let found = std::iter::repeat_with(asked).find_map(Result::ok);
    assert_eq!(found, Some(vec![None]), "there is no row");
    assert!(
        begun.elapsed() >= Duration::from_secs(4),
        "{:?}: its owner may still acknowledge it",
        begun.elapsed()
    );
    let again = std::iter::repeat_with(|| publish_own(&other, &key, 2)).find_map(Result::ok);
    assert_eq!(again, Some(()));
    assert_eq!(sequences(&wait(one.read(query(&key))).expect("read")), [2]);
}

#[test]
fn many_ids_of_a_node_that_is_gone_are_taken_over_together_and_in_their_order() {
    let Some(place) = Keyspace::new() else { return };
    let clock = Clock::system();
    let [one, other] = [(), ()].map(|()| place.open_with(Keyspace::options(), &clock));
    let key = channel("acme", "a");
    let ids: Vec<_> = (0..16).map(|number| number.to_string()).collect();
    for id in &ids {
        assert_eq!(find(&one, &key, id), None, "nothing comes of it");
    }
    let begun = std::time::Instant::now();
    let (send, receive) = mpsc::channel();
    for id in &ids {
        let (send, own) = (send.clone(), id.clone());
        let found = Box::new(move |found| send.send((own, found)).expect("test waits"));
        other.find_ids(scope(&key), vec![id.as_str().into()], found);
    }
    for id in ids {
        assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), (id, Ok(vec![None])));
    }
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}: each takes a second", begun.elapsed());
}
