//! Paths that may be named in one place only, so that an invariant can be read off there.

use crate::source::{Tree, code_only, line_of, words};

struct Rule {
    /// Paths that may not be named …
    names: &'static [&'static str],
    /// … in files under these …
    within: &'static [&'static str],
    /// … except in these …
    except: &'static [&'static str],
    /// … because of this.
    reason: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        names: &["tokio::spawn", "tokio::task::spawn", "tokio::task::spawn_local"],
        within: &["node/src/"],
        except: &["node/src/tasks.rs"],
        reason: "every task has an owner and an error policy: tasks::Tasks::spawn",
    },
    Rule {
        names: &["SystemTime::now"],
        within: &["node/src/", "proto/src/"],
        except: &["node/src/model/clock/mod.rs"],
        reason: "model::Clock never goes back and can be passed in",
    },
    Rule {
        names: &["PublishedMessages::new", "PresenceEvent::new", "PresenceEvent::delayed_leave"],
        within: &["node/src/"],
        except: &["node/src/publish.rs", "node/src/publish/"],
        reason: "publish is the only way in",
    },
    Rule {
        names: &["ForwardedMessages::new", "ForwardedPresence::new", "RemoteMembersPage::new"],
        within: &["node/src/"],
        except: &["node/src/cluster/inbound.rs", "node/src/cluster/inbound/"],
        reason: "what a peer forwards comes through cluster::inbound, is delivered, and nothing else",
    },
    Rule {
        names: &["ChannelKey::new"],
        within: &["node/src/"],
        except: &[
            "node/src/auth/",
            "node/src/origin/history/embedded/members.rs",
            "node/src/origin/history/embedded/export.rs",
            "node/src/origin/history/scylla/members.rs",
            "node/src/cluster/inbound/ids.rs",
        ],
        reason: "a channel is named through auth::Principal::channel, with its account, by a peer, or read back from where it was stored",
    },
    Rule {
        names: &["StatusCode"],
        within: &["node/src/"],
        except: &["node/src/edge/"],
        reason: "only the edge knows status codes",
    },
    Rule {
        names: &["tokio", "mio", "std::net", "std::fs", "std::thread", "Instant::now"],
        within: &["node/src/model/", "node/src/session/", "proto/src/"],
        except: &[],
        reason: "no I/O, no threads, and the time is passed in",
    },
];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, code) in tree.product_code() {
        let under = |folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
        for rule in RULES.iter().filter(|rule| under(rule.within) && !under(rule.except)) {
            for name in rule.names {
                let lines = words(&code, name).map(|at| line_of(&code, at));
                findings.extend(lines.map(|line| format!("{path}:{line}: {name}, but {}", rule.reason)));
            }
        }
    }
    findings
}

/// Tests that sleep, in which no reader can tell what passes meanwhile.
pub(crate) fn check_sleeps(tree: &Tree) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files().filter(|(path, _)| path.starts_with("cluster-tests/tests/")) {
        let code = code_only(text);
        let lines = ["sleep", "sleep_until"].iter().flat_map(|name| words(&code, name));
        findings.extend(lines.map(|at| {
            format!(
                "{path}:{}: sleep, but a test waits for a state, or uses cluster-tests/src/waits.rs",
                line_of(&code, at)
            )
        }));
    }
    findings
}

#[cfg(test)]
fn findings_of(path: &str, code: &str) -> usize {
    check(&Tree::of_samples(&[(path, code)])).len()
}

#[test]
fn each_rule_finds_its_bad_sample() {
    for rule in RULES {
        for folder in rule.within {
            for name in rule.names {
                let code = format!("fn f() {{ {name}(x); }}");
                assert!(findings_of(&format!("{folder}sample.rs"), &code) > 0, "{name} in {folder}");
            }
        }
    }
}

#[test]
fn each_rule_leaves_its_place_and_tests_alone() {
    for rule in RULES {
        for place in rule.except {
            let path = if place.ends_with('/') { format!("{place}sample.rs") } else { (*place).to_owned() };
            assert_eq!(findings_of(&path, &format!("fn f() {{ {}(x); }}", rule.names[0])), 0, "{place}");
        }
        let test = format!("#[cfg(test)]\nmod tests {{ fn f() {{ {}(x); }} }}", rule.names[0]);
        assert_eq!(findings_of("node/src/model/sample.rs", &test), 0);
    }
}

#[test]
fn a_test_that_sleeps_is_found() {
    let code = "async fn f() { tokio::time::sleep(WAIT).await; sleep_until(x); is_asleep(); } // sleep";
    let tree = Tree::of_samples(&[("cluster-tests/tests/a.rs", code), ("cluster-tests/src/waits.rs", code)]);
    assert_eq!(check_sleeps(&tree).len(), 2);
}
