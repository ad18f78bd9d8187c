//! Every HTTP body and the text a TokenRequest signs, byte for byte.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fanfare_proto::http::{
    BatchResponse, BatchResult, ChannelDetails, ChannelEntry, ChannelList, Closed, ConnectionCount,
    ConnectionEntry, ConnectionList, ErrorBody, MetricRow, MetricSeries, Occupancy, OccupancySource,
    PresenceChannel, PresenceList, PresenceMember, PresenceRecord, Published, Record, Time, history_body,
    parse_batch, parse_publish, presence_history_body, write_occupancy_record, write_presence_member,
    write_presence_record, write_record,
};
use fanfare_proto::token::{ServiceClaims, TokenDetails, TokenRequest, TokenRequestBounds, mac};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

fn assert_body<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, text: &str) {
    assert_eq!(serde_json::to_string(value).unwrap(), text);
    assert_eq!(serde_json::from_str::<T>(text).unwrap(), *value);
}

#[test]
fn small_bodies() {
    assert_body(&ErrorBody::new("unauthorized"), r#"{"error":"unauthorized"}"#);
    let limited = ErrorBody { reason: Some("rate_limit".into()), ..ErrorBody::new("too many") };
    assert_body(&limited, r#"{"error":"too many","reason":"rate_limit"}"#);
    assert_body(&Published::new("a:b"), r#"{"channel":"a:b","published":true}"#);
    assert_body(&Time { now: 1_764_000_000_000 }, r#"{"now":1764000000000}"#);
    assert_body(&ConnectionCount { connections: 2, limit: None }, r#"{"connections":2,"limit":null}"#);
    assert_body(&ConnectionCount { connections: 2, limit: Some(5) }, r#"{"connections":2,"limit":5}"#);
}

#[test]
fn listings() {
    let channels = vec![ChannelEntry { name: "a:b".into(), connections: 3, subscribers: 2 }];
    let text = r#"{"channels":[{"name":"a:b","connections":3,"subscribers":2}]}"#;
    assert_body(&ChannelList { channels }, text);
    let connection = ConnectionEntry {
        connection_id: "c_AAAAAAAAAAAAAAAAAAAAAA".into(),
        client_id: Some("alice".into()),
        channels: vec!["a".into(), "b".into()],
        channel_count: 2,
        transport: "websocket".into(),
        authenticated: true,
        connected_at: 1_764_000_000_000,
    };
    let anonymous =
        ConnectionEntry { client_id: None, channels: vec![], channel_count: 0, ..connection.clone() };
    let text = concat!(
        r#"{"connections":[{"connectionId":"c_AAAAAAAAAAAAAAAAAAAAAA","clientId":"alice","channels":["a","b"],"#,
        r#""channelCount":2,"transport":"websocket","authenticated":true,"connectedAt":1764000000000},"#,
        r#"{"connectionId":"c_AAAAAAAAAAAAAAAAAAAAAA","channels":[],"channelCount":0,"#,
        r#""transport":"websocket","authenticated":true,"connectedAt":1764000000000}]}"#
    );
    assert_body(&ConnectionList { connections: vec![connection, anonymous] }, text);
    assert_body(&Closed { closed: 2 }, r#"{"closed":2}"#);
}

#[test]
fn channel_details() {
    let occupancy = Occupancy { connections: 4, publishers: 3, subscribers: 2, members: 1 };
    for (source, text) in [(OccupancySource::Cluster, "cluster"), (OccupancySource::Node, "node")] {
        let counts = r#"{"connections":4,"publishers":3,"subscribers":2,"members":1}"#;
        let text = format!(r#"{{"name":"a:b","occupancy":{counts},"source":"{text}"}}"#);
        assert_body(&ChannelDetails { name: "a:b".into(), occupancy, source }, &text);
    }
}

#[test]
fn occupancy_records() {
    let mut out = Vec::new();
    write_occupancy_record(&mut out, "a\"b", "occ_1", 1_764_000_000_000);
    let text = String::from_utf8(out).unwrap();
    assert_eq!(text, r#"{"channel":"a\"b","id":"occ_1","timestamp":1764000000000}"#);
}

#[test]
fn metric_series() {
    let row = MetricRow {
        account_id: "acme-prod",
        minute: 1_764_000_000_000,
        node_id: "node-1",
        kind: "history-read",
        count: 2,
        bytes: 4_096,
    };
    let text = concat!(
        r#"{"series":[{"accountId":"acme-prod","minute":1764000000000,"nodeId":"node-1","#,
        r#""kind":"history-read","count":2,"bytes":4096}],"windowMs":3600000}"#
    );
    let series = MetricSeries { series: vec![row], window_ms: 3_600_000 };
    assert_eq!(serde_json::to_string(&series).unwrap(), text);
    assert_eq!(serde_json::from_str::<MetricSeries<'_>>(text).unwrap(), series);
}

#[test]
fn batch_results() {
    let results = vec![
        BatchResult::Published { channel: "a".into(), published: true },
        BatchResult::Refused { channel: "[b".into(), error: "channel is reserved".into(), status: 400 },
    ];
    let text = concat!(
        r#"{"results":[{"channel":"a","published":true},"#,
        r#"{"channel":"[b","error":"channel is reserved","status":400}]}"#
    );
    assert_body(&BatchResponse { results }, text);
}

#[test]
fn history() {
    let data = RawValue::from_string("1.0".into()).unwrap();
    let extras = RawValue::from_string(r#"{"tag":"x"}"#.into()).unwrap();
    let full = Record {
        channel: "a:b",
        name: Some("greeting"),
        data: Some(&data),
        id: "m1",
        client_id: Some("alice"),
        connection_id: "c_AAAAAAAAAAAAAAAAAAAAAA",
        extras: Some(&extras),
        timestamp: 1_764_000_000_000,
    };
    let smallest = Record { name: None, data: None, client_id: None, extras: None, id: "m2", ..full };
    let records = [full, smallest].map(|record| {
        let mut out = Vec::new();
        write_record(&mut out, &record);
        String::from_utf8(out).unwrap()
    });
    let body = history_body(records.iter().map(String::as_str));
    let sample = include_str!("samples/history.json").trim_end();
    assert_eq!(String::from_utf8(body).unwrap(), sample);
    assert_eq!(presence_history_body([]), br#"{"events":[]}"#);
}

#[test]
fn presence_history() {
    let data = RawValue::from_string("1.0".into()).unwrap();
    let enter = PresenceRecord {
        id: None,
        channel: "a:b",
        action: "enter",
        client_id: "alice",
        connection_id: "c_AAAAAAAAAAAAAAAAAAAAAA",
        data: Some(&data),
        timestamp: 1_764_000_000_000,
    };
    let records = [enter, PresenceRecord { action: "leave", data: None, ..enter }].map(|record| {
        let mut out = Vec::new();
        write_presence_record(&mut out, &record);
        String::from_utf8(out).unwrap()
    });
    let text = concat!(
        r#"{"events":[{"channel":"a:b","action":"enter","clientId":"alice","#,
        r#""connectionId":"c_AAAAAAAAAAAAAAAAAAAAAA","data":1.0,"timestamp":1764000000000},"#,
        r#"{"channel":"a:b","action":"leave","clientId":"alice","#,
        r#""connectionId":"c_AAAAAAAAAAAAAAAAAAAAAA","timestamp":1764000000000}]}"#
    );
    let body = presence_history_body(records.iter().map(String::as_str));
    assert_eq!(String::from_utf8(body).unwrap(), text);
}

#[test]
fn presence_member_and_list_match_golden_json() {
    let data = RawValue::from_string("null".into()).unwrap();
    let member = PresenceMember {
        client_id: "alice",
        connection_id: "c_AAAAAAAAAAAAAAAAAAAAAA",
        data: Some(&data),
        updated_at: 1_764_000_000_000,
    };
    let mut out = Vec::new();
    write_presence_member(&mut out, &member);
    let text = concat!(
        r#"{"clientId":"alice","connectionId":"c_AAAAAAAAAAAAAAAAAAAAAA","#,
        r#""data":null,"updatedAt":1764000000000}"#
    );
    assert_eq!(String::from_utf8(out).unwrap(), text);
    let list = PresenceList { channels: vec![PresenceChannel { channel: "a:b".into(), members: 2 }] };
    assert_body(&list, r#"{"channels":[{"channel":"a:b","members":2}]}"#);
}

#[test]
fn publish_bodies() {
    let many = format!("[{}{{}}]", "{},".repeat(2_000));
    assert_eq!(
        parse_publish(many.as_bytes(), 64, 1_000).map(|drafts| drafts.len()),
        Ok(1_001),
        "one too many tells"
    );
    let sizes = |body: &str| parse_publish(body.as_bytes(), 64, 1_000).map(|drafts| drafts.len());
    assert_eq!(sizes("{}"), Ok(1));
    assert_eq!(sizes(r#" [ { "name" : "a" } , { } ] "#), Ok(2));
    let body = r#"{"name":"a","data":[ 1.0, 1e400 ],"id":"m","extras":{ "h" : 1 },"other":null}"#;
    let [draft] = parse_publish(body.as_bytes(), 64, 1_000).unwrap().try_into().unwrap();
    assert_eq!((draft.name.as_deref(), draft.id.as_deref()), (Some("a"), Some("m")));
    assert_eq!(draft.data.unwrap().get(), "[1.0,1e400]");
    assert_eq!(draft.extras.unwrap().get(), r#"{"h":1}"#);
}

#[test]
fn batch_requests() {
    let batch = parse_batch(br#"{"channels":["a","b"],"messages":[{"data":null}]}"#, 64, 1_000).unwrap();
    assert_eq!(batch.channels, ["a", "b"]);
    assert_eq!(batch.messages[0].data.as_ref().unwrap().get(), "null");
    for refused in [
        r#"{"channels":[],"messages":[{}]}"#,
        r#"{"channels":["a"],"messages":[]}"#,
        r#"{"channels":["a"]}"#,
        r#"[["a"],[{}]]"#,
        "",
    ] {
        assert!(parse_batch(refused.as_bytes(), 64, 1_000).is_err(), "{refused}");
    }
}

// The MACs below were computed with another implementation of HMAC.

#[test]
fn a_full_token_request() {
    let request = TokenRequest {
        key_name: "k1".into(),
        ttl: Some(3_600_000.into()),
        capability: Some(r#"{"*":["subscribe"]}"#.into()),
        client_id: Some("alice".into()),
        timestamp: 1_764_000_000_000.into(),
        nonce: "nonce-nonce-0001".into(),
        mac: None,
    };
    let signed = "k1\n3600000\n{\"*\":[\"subscribe\"]}\nalice\n1764000000000\nnonce-nonce-0001\n";
    assert_eq!(request.signing_text(), signed);
    assert_eq!(mac(b"s.e.cret", signed), "cZ4ioyUdiph0S8mTyF0yUjjRd8UFxUWcQsm9zd67HUU=");
    let request = request.sign(b"s.e.cret");
    let body = include_str!("samples/token-request.json").trim_end();
    assert_eq!(request.to_json(), body);
    assert_eq!(TokenRequest::parse(body.as_bytes(), &bounds()), Ok(request));
}

#[test]
fn absent_or_empty_fields_sign_as_empty_lines() {
    let absent = r#"{"nonce":"nonce-nonce-0001","timestamp":1764000000000,"keyName":"k1"}"#;
    let empty = r#"{"nonce":"nonce-nonce-0001","timestamp":1764000000000,"keyName":"k1","clientId":"","capability":""}"#;
    for body in [absent, empty] {
        let request = TokenRequest::parse(body.as_bytes(), &bounds()).unwrap();
        assert_eq!(request.signing_text(), "k1\n\n\n\n1764000000000\nnonce-nonce-0001\n");
        let request = request.sign("sécret".as_bytes());
        assert_eq!(request.mac.as_deref(), Some("ILiwUAm99Ly1RBu7a06gcOEfpnrDr9SZ+/JxaHGkUEo="));
    }
}

#[test]
fn token_details_and_claims() {
    let details = TokenDetails {
        token: "h.p.s".into(),
        key_name: "k1".into(),
        issued: 1_764_000_000_000,
        expires: 1_764_003_600_000,
        capability: r#"{"*":["subscribe"]}"#.into(),
        client_id: Some("alice".into()),
    };
    assert_body(&details, include_str!("samples/token-details.json").trim_end());
    let anonymous = TokenDetails { client_id: None, ..details };
    assert!(!serde_json::to_string(&anonymous).unwrap().contains("clientId"));

    let claims = ServiceClaims {
        iat: 1_764_000_000,
        exp: 1_764_003_600,
        nbf: None,
        aud: None,
        capability: r#"{"*":["subscribe"]}"#.into(),
        client_id: Some("alice".into()),
    };
    assert_body(&claims, include_str!("samples/claims.json").trim_end());
    assert_body(&ServiceClaims { client_id: None, ..claims }, {
        r#"{"iat":1764000000,"exp":1764003600,"x-service-capability":"{\"*\":[\"subscribe\"]}"}"#
    });
    let null = r#"{"iat":1,"exp":2,"x-service-capability":"{}","x-service-client-id":null}"#;
    assert!(serde_json::from_str::<ServiceClaims>(null).is_err());
}

fn bounds() -> TokenRequestBounds {
    TokenRequestBounds { nesting_max: 64, ttl_ms_max: 172_800_000, nonce_characters: 16..=128 }
}
