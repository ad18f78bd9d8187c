use std::io::Read as _;
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
fn backlog_capped_by_the_system_is_reported() {
    assert_eq!((short_of(BACKLOG), short_of(i32::MAX)), (None, None));
    let message = short_of(128).unwrap();
    assert!(message.contains("128") && message.contains("4096"), "{message}");
}

/// The answer of a node, read until it has closed the connection.
fn answer(mut client: Client) -> String {
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_connection_beyond_the_bound_is_refused_at_once() {
    let listener = BoundAddress::to("127.0.0.1:0".parse().unwrap()).unwrap().listen().unwrap();
    let address = listener.local_addr().unwrap();
    let (shards, _polls) = Shards::prepare(1).unwrap();
    let stopped = Arc::new(AtomicBool::new(false));
    let accept = accept(shards, &stopped);
    let files = Arc::clone(&accept.files);
    let ending = listener.try_clone().unwrap();
    let thread = std::thread::spawn(move || accept.run(&listener));
    // Of 8 files 4 are for clients, and as many clients wait for their shard.
    let clients: Vec<Client> = (0..4).map(|_| Client::connect(address).unwrap()).collect();
    wait_until("the last connection", || files.is_full());
    for _ in 0..3 {
        let answer = answer(Client::connect(address).unwrap());
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    }
    drop(clients);
    stopped.store(true, Ordering::SeqCst);
    socket2::SockRef::from(&ending).shutdown(std::net::Shutdown::Read).unwrap();
    wait_until("the end of the thread", || thread.is_finished());
}

fn accept(shards: Shards, stopping: &Arc<AtomicBool>) -> AcceptThread {
    let limits = Limits { sse_streams: 0, ..Limits::default() };
    let (files, stopping) = (Arc::new(ClientFiles::within(8, &limits)), Arc::clone(stopping));
    AcceptThread {
        shards: Arc::new(shards),
        tls: None,
        proxies: Arc::default(),
        handshake_bytes: 0,
        files,
        stopping,
    }
}

#[test]
fn listener_waits_until_node_opens_or_stops_or_time_is_over() {
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
