use super::*;

#[test]
fn a_publish_reaches_the_targets_with_interest_alone() {
    let (hub, targets) = hub_of(3, Clock::manual(NOW_MS));
    let (one, _) = hub.attach(&key("a"), 0);
    hub.attach(&key("a"), 2);
    hub.attach(&key("b"), 1);
    publish(&hub, &key("a"), 2);
    assert_eq!(targets[0].sequences(), [1, 2]);
    assert!(targets[1].sequences().is_empty());
    assert_eq!(targets[2].sequences(), [1, 2]);
    hub.detach(&one, 0);
    publish(&hub, &key("a"), 1);
    assert_eq!((targets[0].sequences().len(), targets[2].sequences()), (2, vec![1, 2, 3]));
    let delivery = Arc::clone(&targets[2].deliveries.lock()[0]);
    assert_eq!((delivery.channel, delivery.offset()), (one.number(), 2));
}

#[test]
fn the_same_name_in_another_account_is_another_channel() {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.attach(&key("a"), 0);
    let other = ChannelKey::new(AccountId::new("other"), ChannelName::of("a"));
    publish(&hub, &other, 1);
    assert!(targets[0].sequences().is_empty());
}

#[test]
fn the_last_of_64_targets_gets_its_own() {
    let (hub, targets) = hub_without_buffers(64, Clock::manual(NOW_MS));
    let (channel, _) = hub.attach(&key("a"), 63);
    publish(&hub, &key("a"), 1);
    assert_eq!(targets[63].sequences(), [1]);
    assert!(targets[..63].iter().all(|target| target.sequences().is_empty()));
    hub.detach(&channel, 63);
    assert_eq!(hub.channel_count(), 0);
}

#[test]
fn attach_position_includes_all_earlier_sequences() {
    let (hub, _targets) = hub_of(2, Clock::manual(NOW_MS));
    let first = hub.attach(&key("a"), 0).1;
    let last = publish(&hub, &key("a"), 3).last();
    let (_, position) = hub.attach(&key("a"), 1);
    assert_eq!((&position, hub.position(&key("a")).own), (&ChannelPosition::own(last), last));
    assert_eq!(position.offset, first.offset + 3);
    assert_eq!(position.own.incarnation, first.own.incarnation);
}

#[test]
fn channel_without_subscribers_is_dropped_and_sequences_go_on() {
    let (hub, _targets) = hub_without_buffers(1, Clock::manual(NOW_MS));
    let mut last = 0;
    for round in 0..50 {
        let (channel, position) = hub.attach(&key("a"), 0);
        assert!(position.offset >= last, "round {round}");
        let published = publish(&hub, &key("a"), 2);
        assert_eq!(published.messages[0].sequence, position.offset + 1);
        hub.detach(&channel, 0);
        assert_eq!(hub.channel_count(), 0);
        let undelivered = publish(&hub, &key("a"), 1);
        assert!(undelivered.last().sequence > published.last().sequence, "round {round}");
        publish(&hub, &key("b"), 5);
        assert_eq!(hub.channel_count(), 0, "a publish that nobody hears leaves nothing");
        assert!(hub.position(&key("a")).offset >= undelivered.last().sequence);
        last = undelivered.last().sequence;
    }
}

#[test]
fn a_channel_that_comes_back_has_another_number() {
    let (hub, _targets) = hub_without_buffers(1, Clock::manual(NOW_MS));
    let (earlier, _) = hub.attach(&key("a"), 0);
    hub.detach(&earlier, 0);
    let (later, _) = hub.attach(&key("a"), 0);
    assert_ne!(earlier.number(), later.number());
    hub.detach(&earlier, 0);
    assert_eq!(hub.channel_count(), 1, "a detach of the former one does not take the latter");
    publish(&hub, &key("a"), 1);
}

#[test]
fn timestamps_follow_the_clock_and_never_go_back() {
    let clock = Clock::manual(NOW_MS);
    let (hub, targets) = hub_of(1, clock.clone());
    hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 1);
    clock.pass_to(NOW_MS + 5);
    publish(&hub, &key("a"), 1);
    clock.pass_to(NOW_MS);
    publish(&hub, &key("a"), 1);
    let stamps: Vec<u64> =
        targets[0].deliveries.lock().iter().map(|delivery| delivery.published().timestamp_ms).collect();
    assert_eq!(stamps, [NOW_MS, NOW_MS + 5, NOW_MS + 5]);
}

#[test]
fn two_hubs_are_two_incarnations() {
    let (one, _) = hub_of(0, Clock::manual(NOW_MS));
    let (other, _) = hub_of(0, Clock::manual(NOW_MS));
    assert_ne!(one.position(&key("a")).own.incarnation, other.position(&key("a")).own.incarnation);
}
