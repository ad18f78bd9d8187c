use std::net::TcpStream as Client;
use std::time::Instant;

use super::*;

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::yield_now();
    }
}

#[test]
fn at_the_bound_connections_stay_in_the_backlog_until_one_goes() {
    let listener = Bound::to("127.0.0.1:0".parse().unwrap()).unwrap().listen().unwrap();
    let address = listener.local_addr().unwrap();
    let (shards, _polls) = Shards::prepare(1).unwrap();
    let stopped = Arc::new(AtomicBool::new(false));
    let accept = accept(shards, &stopped);
    let open = Arc::clone(&accept.open);
    let thread = std::thread::spawn(move || accept.run(&listener));
    let accepted = || open.load(Ordering::Relaxed);
    let _clients: Vec<Client> = (0..5).map(|_| Client::connect(address).unwrap()).collect();
    wait_until("the second connection", || accepted() == 2);
    let until = Instant::now() + 5 * FULL_PAUSE;
    while Instant::now() < until {
        assert_eq!(accepted(), 2, "one more was accepted at the bound");
        std::thread::yield_now();
    }
    open.fetch_sub(1, Ordering::Relaxed);
    wait_until("the third connection", || accepted() == 2);
    stopped.store(true, Ordering::SeqCst);
    wait_until("the end of the thread", || thread.is_finished());
}

fn accept(shards: Shards, stopping: &Arc<AtomicBool>) -> Accept {
    let (open, stopping) = (Arc::new(AtomicUsize::new(0)), Arc::clone(stopping));
    Accept { shards: Arc::new(shards), tls: None, handshake_bytes: 0, open, open_max: 2, stopping }
}

#[test]
fn accepting_waits_until_the_node_may_open_or_stops_or_time_is_over() {
    const LONG: Duration = Duration::from_secs(600);
    let (shards, _polls) = Shards::prepare(1).unwrap();
    let stopping = Arc::new(AtomicBool::new(false));
    let accept = accept(shards, &stopping);
    let looks = std::cell::Cell::new(0);
    let on_third_look = || looks.replace(looks.get() + 1) >= 2;
    accept.wait(on_third_look, LONG);
    assert_eq!(looks.get(), 3);
    let begun = Instant::now();
    accept.wait(|| false, 5 * OPEN_LOOK);
    assert!(begun.elapsed() >= 5 * OPEN_LOOK);
    accept.wait(
        || {
            stopping.store(true, Ordering::SeqCst);
            false
        },
        LONG,
    );
}

#[test]
fn connections_and_streams_leave_the_store_its_files() {
    for (files, connections, sse_streams, expected) in [
        (1_048_576, 0, 10_000, (1_028_064, 10_000)),
        (20_000, 0, 10_000, (14_616, 2_436)),
        (20_000, 0, 100, (19_288, 100)),
        (1_024, 0, 10_000, (384, 64)),
        (256, 0, 10_000, (384, 64)),
        (20_000, 5_000, 10_000, (5_000, 2_436)),
        (20_000, 0, 0, (19_488, 0)),
    ] {
        let limits = within(files, Limits { connections, sse_streams, ..Limits::default() });
        assert_eq!((limits.connections, limits.sse_streams), expected, "{files} {connections} {sse_streams}");
        if connections == 0 && files >= 1_024 {
            assert!(limits.connections + STREAM_FILES * limits.sse_streams + 512 <= files as usize);
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn there_is_room_for_the_files_before_they_are_opened() {
    within_open_files(Limits::default());
    let files = open_files_max();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let room = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    assert!(room.trim().parse::<u64>().unwrap() >= files.min(ROOM_MAX), "{room} for {files}");
    make_room(0);
    make_room(u64::MAX);
}
