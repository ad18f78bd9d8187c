use super::*;

fn sort_key(connected_ms: u64, id: u8) -> ConnectionSortKey {
    ConnectionSortKey {
        connected_ms: Reverse(connected_ms),
        connection_id: ConnectionId::from_bytes([id; 16]),
    }
}

fn row() -> ConnectionRow {
    ConnectionRow { client_id: None, channels: Vec::new(), transport: "websocket", authenticated: true }
}

fn connections(
    limit: usize,
    after: Option<ConnectionSortKey>,
    sort_keys: &[ConnectionSortKey],
) -> ConnectionsPage {
    let mut page = ConnectionsPage::new(limit, after);
    sort_keys.iter().for_each(|sort_key| page.insert(*sort_key, row));
    page
}

fn sort_keys(page: ConnectionsPage) -> (Vec<ConnectionSortKey>, bool) {
    let (rows, more) = page.finish();
    (rows.into_iter().map(|(sort_key, _)| sort_key).collect(), more)
}

#[test]
fn a_page_of_connections_is_the_newest_of_all_shards() {
    let (a, b, c, d) = (sort_key(40, 1), sort_key(30, 9), sort_key(30, 10), sort_key(10, 3));
    let mut page = connections(2, None, &[d, b]);
    page.merge(connections(2, None, &[c, a]));
    assert_eq!(sort_keys(page), (vec![a, b], true));
    let mut page = connections(2, Some(b), &[d, b]);
    page.merge(connections(2, Some(b), &[c, a]));
    assert_eq!(sort_keys(page), (vec![c, d], false));
    assert_eq!(sort_keys(connections(2, Some(d), &[a, b, c, d])), (vec![], false));
    assert_eq!(sort_keys(connections(2, None, &[a, b])), (vec![a, b], false), "exactly a page");
}

#[test]
fn a_page_of_connections_holds_no_more_than_it_needs() {
    let mut page = ConnectionsPage::new(3, None);
    for number in 0..1000 {
        page.insert(sort_key(number, 0), row);
        assert!(page.rows.len() <= 4);
    }
    assert_eq!(sort_keys(page).0[0], sort_key(999, 0));
}

/// Page of channels. Each session is a client id, `_` for none, and its attached channels.
fn channels(
    limit: usize,
    order: &ChannelOrder,
    after: Option<ChannelSortKey>,
    sessions: &[(&str, &[&str])],
) -> ChannelsPage {
    let mut page = ChannelsPage::new(limit, order.clone(), after);
    for (client_id, attached) in sessions {
        add(&mut page, client_id, attached);
    }
    page
}

fn name(name: &str) -> ChannelName {
    ChannelName::of(name)
}

fn add(page: &mut ChannelsPage, client_id: &str, attached: &[&str]) {
    let attached: Vec<_> = attached.iter().map(|channel| name(channel)).collect();
    let client_id = (client_id != "_").then(|| ClientId::of(client_id));
    page.add(attached.iter(), client_id.as_ref());
}

fn counts(page: ChannelsPage) -> (Vec<(String, u64, u64)>, Option<ChannelSortKey>) {
    let (rows, last) = page.finish();
    (rows.into_iter().map(|(name, all, distinct)| (name.as_str().to_owned(), all, distinct)).collect(), last)
}

fn expected(rows: &[(&str, u64, u64)]) -> Vec<(String, u64, u64)> {
    rows.iter()
        .map(|(name, connections, subscribers)| ((*name).to_owned(), *connections, *subscribers))
        .collect()
}

#[test]
fn subscribers_over_shards_are_distinct_clients_or_connections() {
    let order = ChannelOrder::default();
    let first: &[(&str, &[&str])] = &[("ann", &["a", "b"]), ("ann", &["a"]), ("_", &["a", "c"])];
    let mut page = channels(10, &order, None, first);
    page.merge(channels(10, &order, None, &[("ann", &["a"]), ("bob", &["a"]), ("_", &["c"])]));
    assert_eq!(counts(page), (expected(&[("a", 5, 2), ("b", 1, 1), ("c", 2, 2)]), None));
}

#[test]
fn pages_hold_each_channel_once_with_full_count_under_change() {
    let first: &[(&str, &[&str])] = &[("_", &["c", "d"]), ("_", &["b", "c"]), ("_", &["a", "d"])];
    let second: &[(&str, &[&str])] = &[("_", &["b", "d", "e"])];
    let throughout = expected(&[("a", 1, 1), ("b", 2, 2), ("c", 2, 2), ("d", 3, 3), ("e", 1, 1)]);
    for limit in 1..=6 {
        let order = ChannelOrder::default();
        let (mut found, mut after, mut turn) = (Vec::new(), None, 0);
        loop {
            // Other channels come and go with every page.
            let passing = [format!("new{turn}"), format!("newer{turn}")];
            turn += 1;
            let mut page = channels(limit, &order, after, first);
            add(&mut page, "_", &[&passing[0], &passing[1]]);
            page.merge(channels(limit, &order, after, second));
            let (rows, last) = counts(page);
            assert!(rows.len() <= limit);
            found.extend(rows.into_iter().filter(|(name, ..)| !name.starts_with("new")));
            match last {
                Some(last) => after = Some(last),
                None => break,
            }
        }
        found.sort();
        assert_eq!(found, throughout, "{limit}");
    }
}

#[test]
fn channel_order_gives_another_sort_key_each_time() {
    let sort_keys: HashSet<u128> =
        (0..10).map(|_| ChannelOrder::default().sort_key(&name("payroll")).0).collect();
    assert_eq!(sort_keys.len(), 10, "or a name could be tried against it");
}

#[test]
fn page_with_many_client_ids_is_cut_short_and_stays_right() {
    let order = ChannelOrder::default();
    // In the order of their sort keys.
    let mut names = ["a", "aa", "b", "c"];
    names.sort_by_key(|channel| order.sort_key(&name(channel)));
    let [first, late, third, last] = names;
    let mut page = ChannelsPage { client_ids_max: 10, ..ChannelsPage::new(100, order.clone(), None) };
    for number in 0..8 {
        add(&mut page, &format!("c{number}"), &[first, third, last]);
        assert!(page.client_ids <= 10);
    }
    add(&mut page, "late", &names);
    let (mut rows, more) = counts(page);
    rows.sort_by_key(|(_, connections, _)| Reverse(*connections));
    assert_eq!(rows, expected(&[(first, 9, 9), (late, 1, 1)]));
    assert_eq!(more, Some(order.sort_key(&name(late))));
    let mut page = ChannelsPage { client_ids_max: 3, ..ChannelsPage::new(100, order, None) };
    for number in 0..8 {
        add(&mut page, &format!("c{number}"), &["a"]);
    }
    assert_eq!(counts(page), (expected(&[("a", 8, 8)]), None), "one channel is always counted");
}
