use super::*;

#[test]
fn connections_and_streams_leave_the_store_its_files() {
    for (files, connections, sse_streams, expected) in [
        (1_048_576, 0, 10_000, (1_027_040, 10_000)),
        (65_536, 0, 10_000, (47_744, 8_128)),
        (20_000, 0, 10_000, (13_592, 2_436)),
        (20_000, 0, 100, (18_264, 100)),
        (1_024, 0, 10_000, (320, 64)),
        (700, 0, 10_000, (221, 43)),
        (256, 0, 10_000, (80, 16)),
        (20_000, 5_000, 10_000, (5_000, 2_436)),
        (20_000, 13_592, 10_000, (13_592, 2_436)),
        (20_000, 13_593, 10_000, (13_592, 2_436)),
        (20_000, 18_000, 10_000, (13_592, 2_436)),
        (20_000, 18_464, 10_000, (13_592, 2_436)),
        (20_000, 1_000_000, 10_000, (13_592, 2_436)),
        (20_000, 50_000, 100, (18_264, 100)),
        (20_000, 50_000, 0, (18_464, 0)),
        (300, 1_000, 10_000, (96, 18)),
        (20_000, 0, 0, (18_464, 0)),
        (2, 0, 0, (1, 0)),
    ] {
        let limits = Limits { connections, sse_streams, ..Limits::default() };
        let files_of = ClientFiles::within(files, &limits);
        let limits = files_of.limits(&limits);
        let case = format!("{files} {connections} {sse_streams}");
        assert_eq!((limits.connections, limits.sse_streams), expected, "{case}");
        let reserved = 512.min(files as usize / 2);
        let all = files_of.connections_max + STREAM_FILES * limits.sse_streams + reserved;
        assert!(all <= files as usize, "{case}: {all}");
    }
}

#[test]
fn sockets_leave_http_its_connections() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let files = ClientFiles::within(64, &limits);
    let (_first, second) = (files.take_socket().unwrap(), files.take_socket().unwrap());
    assert!(files.is_full() && !files.is_scarce());
    assert_eq!(files.take_socket().err(), Some(CapacityLimit::Sockets));
    let connections: Vec<ConnectionPermit> = std::iter::from_fn(|| files.take_connection()).collect();
    assert_eq!(connections.len(), 2 + 4);
    drop(second);
    assert!(files.is_full() && files.is_scarce(), "there is no connection left");
    drop(connections);
    assert!(!files.is_full() && !files.is_scarce());
    assert!(files.take_socket().is_ok());
}

#[test]
fn a_node_without_files_counts_as_full_for_a_while() {
    let mut files = ClientFiles::within(1_024, &Limits::default());
    assert!(!files.is_full());
    files.record_out_of_files();
    assert!(files.is_full());
    files.begun = Instant::now().checked_sub(OUT_OF_FILES + Duration::from_secs(1)).unwrap();
    assert!(!files.is_full());
}

#[test]
#[cfg(target_os = "linux")]
fn there_is_room_for_the_files_before_they_are_opened() {
    ClientFiles::open(&Limits::default());
    let files = open_files_max();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let table_size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    assert!(
        table_size.trim().parse::<u64>().unwrap() >= files.min(FILE_TABLE_MAX),
        "{table_size} for {files}"
    );
    presize_file_table(0);
    presize_file_table(u64::MAX);
}
