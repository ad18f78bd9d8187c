//! Webhooks over TLS.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use super::*;

/// Answers each connection once; its certificate is for `hook.test`.
fn receiver() -> (u16, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["hook.test".to_owned()]).expect("a certificate");
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .expect("a good certificate");
    let (config, listener) = (Arc::new(config), TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = ServerConnection::new(Arc::clone(&config)).expect("a connection");
            let mut stream = StreamOwned::new(connection, stream);
            if stream.read(&mut [0; 4096]).is_ok() {
                stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").ok();
            }
        }
    });
    (port, certificate)
}

#[tokio::test]
async fn a_certificate_must_be_trusted_and_for_the_host() {
    let (port, certificate) = receiver();
    let mut roots = RootCertStore::empty();
    roots.add(certificate).expect("a good certificate");
    let names = || TargetLookups::by(|_| Ok(vec![LOOPBACK]));
    let trusting = Webhooks::new(clients(&["127.0.0.1"], roots, names()));
    let trusting_none = webhooks_with(&["127.0.0.1"], names());
    for (webhooks, host, expected) in [
        (&trusting, "hook.test", Ok(())),
        (&trusting, "other.test", Err("cannot connect: invalid peer certificate")),
        (&trusting_none, "hook.test", Err("cannot connect: invalid peer certificate: UnknownIssuer")),
    ] {
        let outcome = webhooks.send(&target(&format!("https://{host}:{port}/?hush"), ""), &delivery()).await;
        match expected {
            Ok(()) => assert_eq!(outcome, DeliveryOutcome::Delivered),
            Err(expected) => {
                let reason = reason(&outcome);
                assert!(reason.starts_with(expected) && !reason.contains("hush"), "{host}: {reason}");
            }
        }
    }
}
