use super::*;
use crate::model::{ChannelName, Operation};

#[test]
fn a_key_acts_with_its_own_capability_in_its_own_account() {
    let node = AuthFixture::new();
    let principal = node.http(&[&basic("narrow-secret.narrow")]).unwrap();
    assert_eq!((principal.kind, principal.expires_ms), (PrincipalKind::Key, None));
    assert!(principal.client_id.is_none());
    assert!(principal.allows("chat:a", Operation::Publish) && !principal.allows("a", Operation::Publish));
    let key = principal.channel(ChannelName::of("chat:a"));
    assert_eq!((key.account().as_str(), key.channel()), ("acme", "chat:a"));
}

#[test]
fn without_authentication_all_work_in_one_account() {
    let node = AuthFixture::with(false);
    for principal in [
        node.http(&[]),
        node.http(&["nonsense"]),
        node.socket(&[], "key=x"),
        node.auth.authenticate_token("x").map_err(|_| Unauthorized),
    ] {
        let principal = principal.unwrap();
        assert_eq!((principal.account.id.as_str(), principal.kind), ("default", PrincipalKind::Anonymous));
        assert!(Operation::ALL.into_iter().all(|operation| principal.allows("any", operation)));
        assert!(node.auth.review(&principal).is_some());
    }
}

#[test]
fn a_live_credential_ends_with_its_key() {
    let base = directory().text().to_owned();
    let cases = [
        ("nothing", base.clone(), true, true),
        ("another key", base.replace("narrow", "wide"), true, true),
        ("status", base.replacen("active", "revoked", 1), false, false),
        ("name", base.replace("\"k1\"", "\"k2\""), false, false),
        ("secret", base.replace("s.e.c", "x.y.z"), false, false),
        ("account", base.replace("\"acme\"", "\"acme-test\""), false, false),
        ("less capability", base.replace(", \"history\"]", "]"), true, true),
        (
            "less than the token claims",
            base.replace("\"publish\", \"history\"]", "\"history\"]"),
            true,
            false,
        ),
        ("more capability", base.replace("\"history\"]", "\"history\", \"presence\"]"), true, true),
    ];
    for (change, text, key_holds, token_holds) in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("directory.toml");
        std::fs::write(&path, &base).unwrap();
        let accounts = Accounts::open(&path, 72).unwrap();
        let node = AuthFixture::over(accounts.clone(), true);
        let by_key = node.http(&[&basic("s.e.c.k1")]).unwrap();
        let by_token = node.auth.authenticate_token(&sign("k1", &claims())).unwrap();
        std::fs::write(&path, text).unwrap();
        accounts.reload().unwrap();
        assert_eq!(node.auth.review(&by_key).is_some(), key_holds, "{change}");
        assert_eq!(node.auth.review(&by_token).is_some(), token_holds, "{change}");
    }
}

#[test]
fn live_key_follows_capability_and_account_of_the_directory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    let base = directory().text().to_owned();
    std::fs::write(&path, &base).unwrap();
    let accounts = Accounts::open(&path, 72).unwrap();
    let node = AuthFixture::over(accounts.clone(), true);
    let by_key = node.http(&[&basic("s.e.c.k1")]).unwrap();
    let by_token = node.auth.authenticate_token(&sign("k1", &claims())).unwrap();
    let operations = |principal: &Principal| {
        let reviewed = node.auth.review(principal).unwrap();
        let history = reviewed.account.policy("c").history;
        ([Operation::Publish, Operation::History].map(|operation| reviewed.allows("c", operation)), history)
    };
    assert_eq!(operations(&by_key), ([true, true], true));
    assert_eq!(operations(&by_token), ([true, false], true));

    let rule = "[[tenants.accounts.channels]]\npattern = \"c\"\nhistory = false\n[[tenants.accounts.keys]]";
    let narrowed = base.replace(", \"history\"]", "]").replacen("[[tenants.accounts.keys]]", rule, 1);
    std::fs::write(&path, narrowed).unwrap();
    accounts.reload().unwrap();
    assert_eq!(operations(&by_key), ([true, false], false));
    assert_eq!(operations(&by_token), ([true, false], false));
    let (expires_ms, issued_s) = (by_token.expires_ms, by_token.issued_s);
    let reviewed = node.auth.review(&by_token).unwrap();
    assert_eq!(
        (reviewed.expires_ms, reviewed.issued_s, reviewed.kind),
        (expires_ms, issued_s, by_token.kind)
    );

    std::fs::write(&path, "not a directory").unwrap();
    accounts.reload().unwrap_err();
    assert_eq!(operations(&by_key), ([true, false], false), "a broken file changes nothing");
}

#[test]
fn client_without_need_of_credential_has_configured_retention() {
    let limits = Limits { history_retention_hours: 5, ..Limits::default() };
    let node = AuthFixture::build(Accounts::fixed(Directory::default()), &limits, false);
    assert_eq!(node.http(&[]).unwrap().account.policy("c").retention_hours, 5);
}
