use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};

use super::*;

fn proxies(trusted: &[&str]) -> Proxies {
    let trusted: Vec<Network> = trusted.iter().map(|text| text.parse().expect(text)).collect();
    Proxies::new(&trusted, true)
}

fn address(text: &str) -> IpAddr {
    text.parse().expect(text)
}

#[test]
fn forwarded_for_is_believed_of_trusted_proxies_alone() {
    let trusted = ["10.0.0.0/8", "fd00::/8"].map(|text| text.parse().expect(text));
    let proxies = Proxies::new(&trusted, false);
    for (peer, values, client) in [
        ("10.0.0.1", vec![], "10.0.0.1"),
        ("10.0.0.1", vec!["203.0.113.7"], "203.0.113.7"),
        ("::ffff:10.0.0.1", vec!["203.0.113.7"], "203.0.113.7"),
        ("198.51.100.1", vec!["203.0.113.7"], "198.51.100.1"),
        ("10.0.0.1", vec!["192.0.2.66, 203.0.113.7, 10.0.0.2"], "203.0.113.7"),
        ("10.0.0.1", vec!["192.0.2.66", "203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", vec!["10.0.0.3,10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", vec!["203.0.113.7:4711"], "203.0.113.7"),
        ("fd00::1", vec!["[2001:db8::7]:4711"], "2001:db8::7"),
        ("fd00::1", vec!["[2001:db8::7]"], "2001:db8::7"),
        ("10.0.0.1", vec!["203.0.113.7, unknown"], "10.0.0.1"),
        ("10.0.0.1", vec!["203.0.113.7, , 10.0.0.2"], "10.0.0.2"),
    ] {
        let given = values.iter().map(|value: &&str| value.as_bytes());
        assert_eq!(proxies.client(address(peer), given), address(client), "{peer} {values:?}");
    }
    let by_header = Proxies::new(&trusted, true);
    let given = [&b"203.0.113.7"[..]].into_iter();
    assert_eq!(by_header.client(address("10.0.0.1"), given), address("10.0.0.1"), "the client wrote it");
}

#[test]
fn connections_of_trusted_proxies_alone_begin_with_a_header() {
    let peer = |text: &str| SocketAddr::new(address(text), 1);
    assert_eq!(proxies(&["10.0.0.0/8"]).begin(peer("10.1.1.1")), Some(Box::new(ProxiedClient::Awaited)));
    assert_eq!(proxies(&["10.0.0.0/8"]).begin(peer("11.1.1.1")), None);
    let silent = Proxies::new(&["10.0.0.0/8".parse().expect("a network")], false);
    assert_eq!(silent.begin(peer("10.1.1.1")), None);
}

/// Sends the parts one after another. Returns the first result that is not `WouldBlock`, and the bytes left to read.
fn taken(parts: &[&[u8]]) -> (Result<Option<IpAddr>, ErrorKind>, Vec<u8>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let mut client =
        std::net::TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
    let (server, _) = listener.accept().expect("accepted");
    server.set_nonblocking(true).expect("a socket");
    let mut server = TcpStream::from_std(server);
    let mut buffer = [0; 8192];
    let mut result = Err(ErrorKind::WouldBlock);
    let mut sent = 0;
    for part in parts {
        client.write_all(part).expect("sent");
        sent += part.len();
        while server.peek(&mut buffer).unwrap_or(0) < sent {
            std::thread::yield_now();
        }
        result = take_header(&mut server, &mut buffer).map_err(|error| error.kind());
        if result != Err(ErrorKind::WouldBlock) {
            break;
        }
    }
    drop(client);
    let mut rest = Vec::new();
    loop {
        match server.read(&mut buffer) {
            Ok(0) => return (result, rest),
            Ok(count) => rest.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => unreachable!("{error}"),
        }
    }
}

fn version_2(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
    let length = u16::try_from(addresses.len()).expect("short").to_be_bytes();
    [b"\r\n\r\n\0\r\nQUIT\n".as_slice(), &[0x20 | command, family], &length, addresses].concat()
}

#[test]
fn header_is_taken_and_what_follows_it_is_left() {
    let v4 = version_2(1, 0x11, &[203, 0, 113, 7, 10, 0, 0, 1, 0x12, 0x67, 0x1f, 0x90]);
    let with_more = version_2(
        1,
        0x11,
        &[&[203, 0, 113, 7, 10, 0, 0, 1, 0x12, 0x67, 0x1f, 0x90, 4, 0, 3][..], b"abc"].concat(),
    );
    let mut v6 = [0; 36];
    (v6[0], v6[1], v6[15]) = (0x20, 0x01, 7);
    let client = Some(address("203.0.113.7"));
    for (header, client) in [
        (&b"PROXY TCP4 203.0.113.7 10.0.0.1 4711 8080\r\n"[..], client),
        (b"PROXY TCP6 2001::7 2001::1 4711 8080\r\n", Some(address("2001::7"))),
        (b"PROXY TCP6 ::ffff:203.0.113.7 2001::1 4711 8080\r\n", client),
        (b"PROXY UNKNOWN\r\n", None),
        (&v4, client),
        (&with_more, client),
        (&version_2(1, 0x21, &v6), Some(address("2001::7"))),
        (&version_2(0, 0, &[]), None),
    ] {
        let whole = [header, b"GET / HTTP/1.1\r\n"].concat();
        assert_eq!(taken(&[&whole]), (Ok(client), b"GET / HTTP/1.1\r\n".to_vec()));
        for at in 1..header.len() {
            let parts = [&header[..at], &header[at..], b"GET"];
            assert_eq!(taken(&parts), (Ok(client), Vec::new()), "{at}");
        }
    }
}

#[test]
fn end_of_the_stream_is_no_header_and_no_refusal() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    drop(std::net::TcpStream::connect(listener.local_addr().expect("an address")).expect("connected"));
    let (server, _) = listener.accept().expect("accepted");
    let mut server = TcpStream::from_std(server);
    assert_eq!(take_header(&mut server, &mut [0; 64]).ok(), Some(None));
}

#[test]
fn anything_else_is_refused() {
    let long = [b"PROXY TCP4 ".as_slice(), &[b'1'; 5000]].concat();
    let endless = version_2(1, 0x11, &[0; 6000]);
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"PROXY TCP4 203.0.113.700 10.0.0.1 4711 8080\r\n",
        b"PROXY UDP4 203.0.113.7 10.0.0.1 4711 8080\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x31\x11\0\0",
        b"\x16\x03\x01\0\0",
        &long,
        &endless[..5000],
    ] {
        assert_eq!(taken(&[bytes]).0, Err(ErrorKind::InvalidData), "{:?}", String::from_utf8_lossy(bytes));
    }
}
