use super::*;

const GOOD: [&str; 3] = ["--store=scylla", "--scylla-node=10.0.0.1:9042", "--directory=/dev/null"];

#[test]
fn the_shared_store_is_configured_from_every_source() {
    let file = "store = 'scylla'\nscylla_node = ['10.0.0.1:9042', 'b.example:9042']\nscylla_keyspace = 'chat'\n\
                scylla_schema = 'check'\nscylla_replication = 3\nscylla_datacenter = 'north'\n\
                scylla_user = 'ada'\nscylla_password_file = 'secret'\ndirectory = '/dev/null'";
    let variables = [
        ("FANFARE_STORE", "scylla"),
        ("FANFARE_SCYLLA_NODE", "10.0.0.1:9042,b.example:9042"),
        ("FANFARE_SCYLLA_KEYSPACE", "chat"),
        ("FANFARE_SCYLLA_SCHEMA", "check"),
        ("FANFARE_SCYLLA_REPLICATION", "3"),
        ("FANFARE_SCYLLA_DATACENTER", "north"),
        ("FANFARE_SCYLLA_USER", "ada"),
        ("FANFARE_SCYLLA_PASSWORD_FILE", "secret"),
        ("FANFARE_DIRECTORY", "/dev/null"),
    ];
    let given = [
        "--store=scylla",
        "--scylla-node=10.0.0.1:9042",
        "--scylla-node=b.example:9042",
        "--scylla-keyspace=chat",
        "--scylla-schema=check",
        "--scylla-replication=3",
        "--scylla-datacenter=north",
        "--scylla-user=ada",
        "--scylla-password-file=secret",
        "--directory=/dev/null",
    ];
    for config in [load(file, &[], &[]), load("", &variables, &[]), load("", &[], &given)] {
        let config = config.unwrap();
        assert_eq!(config.store, StoreKind::Scylla);
        assert_eq!(config.scylla_nodes, ["10.0.0.1:9042", "b.example:9042"]);
        assert_eq!((config.scylla_keyspace.as_str(), config.scylla_schema), ("chat", SchemaMode::Check));
        assert_eq!(config.scylla_replication, Some(3));
        assert_eq!(config.scylla_datacenter.as_deref(), Some("north"));
        assert_eq!(config.scylla_user.as_deref(), Some("ada"));
        assert_eq!(config.scylla_password_file, Some("secret".into()));
    }
    let config = load("", &[], &GOOD).unwrap();
    assert_eq!((config.scylla_keyspace.as_str(), config.scylla_schema), ("fanfare", SchemaMode::Auto));
    assert_eq!(config.scylla_replication, None);
}

#[test]
fn nodes_of_a_cluster_may_share_it() {
    let cluster =
        ["--gossip-listen=127.0.0.1:0", "--peer-listen=127.0.0.1:0", "--cluster-key-file=cluster.key"];
    load("", &[], &[&GOOD[..], &cluster].concat()).unwrap();
}

#[test]
fn scylla_store_with_missing_or_invalid_settings_is_refused() {
    let mistakes = load("", &[], &["--store=scylla", "--directory=/dev/null"]).unwrap_err();
    assert_eq!(mistakes, ["--store: needs --scylla-node as well, where a node of the database is"]);
    for (given, expected) in [
        ("--scylla-user=ada", "--scylla-user: needs --scylla-password-file as well"),
        ("--scylla-password-file=x", "--scylla-password-file: needs --scylla-user as well"),
    ] {
        assert_eq!(load("", &[], &[&GOOD[..], &[given]].concat()).unwrap_err(), [expected]);
    }
    for (given, expected) in [
        ("--scylla-keyspace=A", "1 to 48 lower-case letters, digits or `_`, a letter first, got `A`"),
        ("--scylla-keyspace=1", "1 to 48 lower-case letters, digits or `_`, a letter first, got `1`"),
        ("--scylla-schema=yes", "auto or check, got `yes`"),
    ] {
        let name = given.split_once('=').unwrap().0;
        let expected = format!("{name}: expected {expected}");
        assert_eq!(load("", &[], &[&GOOD[..], &[given]].concat()).unwrap_err(), [expected]);
    }
    for copies in ["0", "10"] {
        let given = format!("--scylla-replication={copies}");
        let mistakes = load("", &[], &[&GOOD[..], &[&given]].concat()).unwrap_err();
        assert_eq!(mistakes, [format!("--scylla-replication: must be between 1 and 9, got `{copies}`")]);
    }
}

#[test]
fn scylla_settings_without_scylla_store_are_refused() {
    for flag in [
        "--scylla-node=a:1",
        "--scylla-keyspace=a",
        "--scylla-schema=check",
        "--scylla-replication=1",
        "--scylla-datacenter=a",
        "--scylla-user=a",
        "--scylla-password-file=a",
    ] {
        let name = flag.split_once('=').unwrap().0;
        assert_eq!(load("", &[], &[flag]).unwrap_err(), [format!("{name}: is for --store scylla")]);
    }
}
