use super::*;

fn place(connected_ms: u64, id: u8) -> ConnectionPlace {
    ConnectionPlace { connected_ms: Reverse(connected_ms), connection_id: ConnectionId::from_bytes([id; 16]) }
}

fn row() -> ConnectionRow {
    ConnectionRow { client_id: None, channels: Vec::new(), transport: "websocket", authenticated: true }
}

fn connections(limit: usize, after: Option<ConnectionPlace>, places: &[ConnectionPlace]) -> ConnectionsPage {
    let mut page = ConnectionsPage::new(limit, after);
    places.iter().for_each(|place| page.insert(*place, row));
    page
}

fn places(page: ConnectionsPage) -> (Vec<ConnectionPlace>, bool) {
    let (rows, more) = page.finish();
    (rows.into_iter().map(|(place, _)| place).collect(), more)
}

#[test]
fn a_page_of_connections_is_the_newest_of_all_shards() {
    let (a, b, c, d) = (place(40, 1), place(30, 9), place(30, 10), place(10, 3));
    let mut page = connections(2, None, &[d, b]);
    page.merge(connections(2, None, &[c, a]));
    assert_eq!(places(page), (vec![a, b], true));
    let mut page = connections(2, Some(b), &[d, b]);
    page.merge(connections(2, Some(b), &[c, a]));
    assert_eq!(places(page), (vec![c, d], false));
    assert_eq!(places(connections(2, Some(d), &[a, b, c, d])), (vec![], false));
    assert_eq!(places(connections(2, None, &[a, b])), (vec![a, b], false), "exactly a page");
}

#[test]
fn a_page_of_connections_holds_no_more_than_it_needs() {
    let mut page = ConnectionsPage::new(3, None);
    for number in 0..1000 {
        page.insert(place(number, 0), row);
        assert!(page.rows.len() <= 4);
    }
    assert_eq!(places(page).0[0], place(999, 0));
}

/// `channels` are names with what they are seen with: a connection for each letter, `_` for one without a client id.
fn channels(limit: usize, after: Option<&str>, sessions: &[(&str, &[&str])]) -> ChannelsPage {
    let name = |name: &str| ChannelName::new(name).unwrap();
    let mut page = ChannelsPage::new(limit, after.map(name));
    for (client_id, attached) in sessions {
        add(&mut page, client_id, attached);
    }
    page
}

fn add(page: &mut ChannelsPage, client_id: &str, attached: &[&str]) {
    let attached: Vec<_> = attached.iter().map(|name| ChannelName::new(name).unwrap()).collect();
    let client_id = (client_id != "_").then(|| ClientId::new(client_id).unwrap());
    page.add(attached.iter(), client_id.as_ref());
}

fn counts(page: ChannelsPage) -> (Vec<(String, u64, u64)>, bool) {
    let (rows, more) = page.finish();
    (rows.into_iter().map(|(name, all, distinct)| (name.as_str().to_owned(), all, distinct)).collect(), more)
}

fn expected(rows: &[(&str, u64, u64)]) -> Vec<(String, u64, u64)> {
    rows.iter()
        .map(|(name, connections, subscribers)| ((*name).to_owned(), *connections, *subscribers))
        .collect()
}

#[test]
fn subscribers_are_distinct_client_ids_or_connections_over_all_shards() {
    let mut page = channels(10, None, &[("ann", &["a", "b"]), ("ann", &["a"]), ("_", &["a", "c"])]);
    page.merge(channels(10, None, &[("ann", &["a"]), ("bob", &["a"]), ("_", &["c"])]));
    assert_eq!(counts(page), (expected(&[("a", 5, 2), ("b", 1, 1), ("c", 2, 2)]), false));
}

#[test]
fn a_page_of_channels_counts_each_of_them_whole() {
    let first: &[(&str, &[&str])] = &[("_", &["c", "d"]), ("_", &["b", "c"]), ("_", &["a", "d"])];
    let second: &[(&str, &[&str])] = &[("_", &["b", "d", "e"])];
    let page_after = |after| {
        let mut page = channels(2, after, first);
        page.merge(channels(2, after, second));
        counts(page)
    };
    assert_eq!(page_after(None), (expected(&[("a", 1, 1), ("b", 2, 2)]), true));
    assert_eq!(page_after(Some("b")), (expected(&[("c", 2, 2), ("d", 3, 3)]), true));
    assert_eq!(page_after(Some("d")), (expected(&[("e", 1, 1)]), false));
    assert_eq!(page_after(Some("e")), (vec![], false));
}

#[test]
fn a_page_with_very_many_client_ids_is_cut_short_and_never_wrong() {
    let mut page = ChannelsPage { client_ids_max: 10, ..ChannelsPage::new(100, None) };
    for number in 0..8 {
        add(&mut page, &format!("c{number}"), &["a", "b", "c"]);
        assert!(page.client_ids <= 10);
    }
    add(&mut page, "late", &["a", "aa", "b", "c"]);
    let (rows, more) = counts(page);
    assert_eq!(rows, expected(&[("a", 9, 9), ("aa", 1, 1)]));
    assert!(more);
    let mut page = ChannelsPage { client_ids_max: 3, ..ChannelsPage::new(100, None) };
    for number in 0..8 {
        add(&mut page, &format!("c{number}"), &["a"]);
    }
    assert_eq!(counts(page), (expected(&[("a", 8, 8)]), false), "one channel is always counted");
}
