use super::*;

/// A node that may run in a cluster, with its directory beside it.
const GOOD: [&str; 5] = [
    "--gossip-listen=127.0.0.1:0",
    "--peer-listen=127.0.0.1:0",
    "--cluster-key-file=cluster.key",
    "--store=none",
    "--directory=/dev/null",
];

fn without(flag: &str) -> Vec<&'static str> {
    GOOD.into_iter().filter(|given| !given.starts_with(flag)).collect()
}

#[test]
fn a_node_of_a_cluster_is_configured_from_every_source() {
    let seeds = ["10.0.0.1:7946", "nodes.example:7946", "[::1]:7946"];
    let file = "gossip_listen = '127.0.0.1:0'\npeer_listen = '127.0.0.1:0'\nadvertise = 'a.example'\n\
                seed = ['10.0.0.1:7946', 'nodes.example:7946', '[::1]:7946']\ncluster_key_file = 'cluster.key'\n\
                store = 'none'\ndirectory = '/dev/null'";
    let variables = [
        ("FANFARE_GOSSIP_LISTEN", "127.0.0.1:0"),
        ("FANFARE_PEER_LISTEN", "127.0.0.1:0"),
        ("FANFARE_ADVERTISE", "a.example"),
        ("FANFARE_SEED", "10.0.0.1:7946, nodes.example:7946,[::1]:7946"),
        ("FANFARE_CLUSTER_KEY_FILE", "cluster.key"),
        ("FANFARE_STORE", "none"),
        ("FANFARE_DIRECTORY", "/dev/null"),
    ];
    let seed_flags = ["--seed", seeds[0], "--seed", seeds[1], "--seed", seeds[2], "--advertise=a.example"];
    let given = [&GOOD[..], &seed_flags].concat();
    for config in [load(file, &[], &[]), load("", &variables, &[]), load("", &[], &given)] {
        let config = config.unwrap();
        assert_eq!(config.gossip_listen, Some(([127, 0, 0, 1], 0).into()));
        assert_eq!(config.peer_listen, Some(([127, 0, 0, 1], 0).into()));
        assert_eq!(config.advertise.as_deref(), Some("a.example"));
        assert_eq!(config.seeds, seeds);
        assert_eq!(config.cluster_key_file, Some("cluster.key".into()));
        assert!(!config.development());
    }
    // A stronger source replaces the list.
    let config = load(file, &[], &["--seed", "10.0.0.9:1"]).unwrap();
    assert_eq!(config.seeds, ["10.0.0.9:1"]);
    assert_eq!(load("", &[], &GOOD).unwrap().seeds, [""; 0]);
}

#[test]
fn cluster_without_required_settings_is_refused_with_advice() {
    let mistakes = load("", &[], &without("--cluster-key-file")).unwrap_err();
    let key = "needs --cluster-key-file, a file that is the same on every node: make it with `openssl rand -base64 32`";
    assert_eq!(mistakes, [format!("--gossip-listen: {key}")]);
    let mistakes = load("", &[], &without("--peer-listen")).unwrap_err();
    assert_eq!(mistakes, ["--gossip-listen: needs --peer-listen as well, where other nodes connect"]);

    let embedded = "the embedded store is on the disk of one node and cannot be that of a cluster; \
                    say --store scylla, which nodes share, or --store none, or leave --gossip-listen out";
    let mistakes = load("", &[], &without("--store")).unwrap_err();
    assert_eq!(mistakes, [format!("--gossip-listen: {embedded}")]);
    let mistakes = load("store = 'embedded'", &[], &without("--store")).unwrap_err();
    assert_eq!(mistakes, [format!("f.toml:1: store: {embedded}")]);
}

#[test]
fn cluster_only_settings_without_gossip_are_refused() {
    for flag in ["--peer-listen=127.0.0.1:0", "--advertise=a", "--seed=a:1", "--cluster-key-file=k"] {
        let name = flag.split_once('=').unwrap().0;
        let expected = format!("{name}: is for a node of a cluster and needs --gossip-listen as well");
        assert_eq!(load("", &[], &[flag]).unwrap_err(), [expected]);
    }
}

#[test]
fn a_node_says_under_which_host_it_is_reached() {
    let wide = ["--gossip-listen=0.0.0.0:0", "--peer-listen=[::]:0"];
    let rest: Vec<_> = GOOD.into_iter().filter(|flag| !flag.contains("-listen")).collect();
    let mistakes = load("", &[], &[&wide[..], &rest].concat()).unwrap_err();
    let expected = [
        "--gossip-listen: nobody can reach this node at 0.0.0.0; name its host with --advertise",
        "--peer-listen: nobody can reach this node at ::; name its host with --advertise",
    ];
    assert_eq!(mistakes, expected);
    load("", &[], &[&wide[..], &rest, &["--advertise", "10.0.0.1"]].concat()).unwrap();
    for host in ["10.0.0.1:80", "a b", ""] {
        let mistakes = load("", &[], &[&GOOD[..], &["--advertise", host]].concat()).unwrap_err();
        assert!(mistakes[0].starts_with("--advertise: expected a name or an address"), "{mistakes:?}");
    }
}

#[test]
fn a_seed_is_a_host_and_a_port() {
    for seed in ["10.0.0.1", "a:0", ":1", "a:b", "::1:7946", "a:70000", "a b:1"] {
        let mistakes = load("", &[], &[&GOOD[..], &["--seed", seed]].concat()).unwrap_err();
        let expected = "--seed: expected a host and a port such as 10.0.0.1:7946 or nodes.example:7946, got";
        assert_eq!(mistakes, [format!("{expected} `{seed}`")]);
    }
    for seed in ["", ",", "a:1,", "a:1,,b:1"] {
        let mistakes = load("", &[], &[&GOOD[..], &["--seed", seed]].concat()).unwrap_err();
        let expected =
            "--seed: expected a host and a port such as 10.0.0.1:7946 or nodes.example:7946, got ``";
        assert_eq!(mistakes, [expected], "{seed}");
    }
    assert_eq!(load("seed = []", &[], &GOOD).unwrap().seeds, [""; 0]);
    let mistakes = load("seed = [1]", &[], &GOOD).unwrap_err();
    assert_eq!(mistakes, ["f.toml:1: seed: expected a string, got an integer"]);
}

#[test]
fn the_peer_listener_has_an_address_of_its_own() {
    let given = [&without("--peer-listen")[..], &["--peer-listen=127.0.0.1:9000", "--listen=127.0.0.1:9000"]]
        .concat();
    let mistakes = load("", &[], &given).unwrap_err();
    assert_eq!(mistakes, ["--peer-listen: 127.0.0.1:9000 is taken by --listen, 127.0.0.1:9000"]);
}

#[test]
fn limits_allowing_publish_too_large_for_peers_are_refused() {
    let limit = |name: &str, value: &str| load("", &[(name, value)], &GOOD);
    let mistakes = limit("FANFARE_LIMITS_HTTP_BODY_BYTES", "16777216").unwrap_err();
    let expected = "--gossip-listen: one publish could be 23497216 bytes for the other nodes, and they take 15728640: lower \
                    limits.http_body_bytes, limits.socket_message_bytes, limits.publish_messages or limits.client_id_bytes";
    assert_eq!(mistakes, [expected]);
    assert!(
        limit("FANFARE_LIMITS_SOCKET_MESSAGE_BYTES", "2097152").is_err(),
        "MessagePack is shorter than JSON"
    );
    assert!(limit("FANFARE_LIMITS_CLIENT_ID_BYTES", "4096").is_err(), "each message has it");
    limit("FANFARE_LIMITS_HTTP_BODY_BYTES", "8388608").unwrap();
    load("", &[("FANFARE_LIMITS_HTTP_BODY_BYTES", "16777216")], &[]).unwrap();
}
