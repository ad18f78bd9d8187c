use super::*;

/// Whether a handshake with a client that trusts the certificate of the files comes to its end.
fn serves(certificates: &Certificates, files: &TestCertificate) -> bool {
    let (mut client, mut pipe) = (files.client(), TlsTestPipe::new());
    let mut server = certificates.accept(16 * 1024).unwrap();
    for _ in 0..10 {
        while client.wants_write() {
            client.write_tls(&mut pipe.incoming).unwrap();
        }
        server.read(&mut pipe, &mut [0; 10]).ok();
        let outgoing = std::mem::take(&mut pipe.outgoing);
        let mut rest = &outgoing[..];
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            if client.process_new_packets().is_err() {
                return false;
            }
        }
        if !client.is_handshaking() {
            return true;
        }
    }
    false
}

#[test]
fn unusable_certificate_or_key_is_refused_naming_its_file() {
    let files = TestCertificate::new();
    let (other_certificate, other_key) = pair();
    let key = std::fs::read_to_string(&files.key).unwrap();
    let certificate = std::fs::read_to_string(&files.certificate).unwrap();
    let secret = key.lines().nth(1).unwrap().to_owned();
    let damaged = key.replace(&secret, "-----BEGIN nothing");
    for (certificate, key, file, reason) in [
        (Some(&certificate), Some(&other_key), "node.key", "does not hold the key of the certificate in"),
        (Some(&other_certificate), Some(&key), "node.key", "node.crt"),
        (Some(&key), Some(&key), "node.crt", "holds no certificate in PEM"),
        (Some(&certificate), Some(&certificate), "node.key", "holds no private key in PEM"),
        (Some(&certificate), Some(&damaged), "node.key", "holds no private key in PEM"),
        (Some(&String::new()), Some(&key), "node.crt", "holds no certificate in PEM"),
        (None, Some(&key), "node.crt", "cannot read"),
        (Some(&certificate), None, "node.key", "cannot read"),
    ] {
        for (path, content) in [(&files.certificate, certificate), (&files.key, key)] {
            match content {
                Some(content) => std::fs::write(path, content).unwrap(),
                None => std::fs::remove_file(path).unwrap(),
            }
        }
        let error = files.open().err().expect("refused");
        let text = error.to_string();
        assert_eq!(error.path(), files.folder.path().join(file), "{text}");
        assert!(text.contains(reason) && text.contains(file), "{text}");
        assert!(!text.contains(&secret), "{text}");
    }
}

#[test]
fn a_new_pair_serves_new_connections() {
    let files = TestCertificate::new();
    let certificates = files.open().unwrap();
    assert!(serves(&certificates, &files));
    assert!(!certificates.reload_if_changed().unwrap(), "nothing has changed");
    files.renew();
    assert!(!serves(&certificates, &files));
    assert!(certificates.reload_if_changed().unwrap());
    assert!(serves(&certificates, &files));
    assert!(!certificates.reload_if_changed().unwrap());
}

#[test]
fn a_broken_pair_changes_nothing_and_is_reported_once() {
    let files = TestCertificate::new();
    let previous = TestCertificate::new();
    for (from, to) in [(&files.certificate, &previous.certificate), (&files.key, &previous.key)] {
        std::fs::copy(from, to).unwrap();
    }
    let certificates = files.open().unwrap();
    std::fs::write(&files.certificate, "broken").unwrap();
    assert!(!certificates.reload_if_changed().unwrap(), "it may be half written");
    let error = certificates.reload_if_changed().expect_err("it was not");
    assert_eq!(error.path(), files.certificate);
    assert!(!certificates.reload_if_changed().expect("it is reported once"));
    assert!(serves(&certificates, &previous));
    std::fs::remove_file(&files.key).unwrap();
    assert!(!certificates.reload_if_changed().unwrap());
    certificates.reload_if_changed().expect_err("a missing file");
    files.renew();
    assert!(certificates.reload_if_changed().unwrap());
    assert!(serves(&certificates, &files));
}

#[test]
fn a_pair_that_is_replaced_file_by_file_is_not_an_error() {
    let files = TestCertificate::new();
    let certificates = files.open().unwrap();
    let (certificate, key) = pair();
    std::fs::write(&files.certificate, certificate).unwrap();
    assert!(!certificates.reload_if_changed().unwrap());
    std::fs::write(&files.key, key).unwrap();
    assert!(certificates.reload_if_changed().unwrap());
    assert!(serves(&certificates, &files));
}
