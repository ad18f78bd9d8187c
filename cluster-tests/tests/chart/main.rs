//! The Helm chart on a real Kubernetes control plane with simulated nodes: the API server accepts its objects, and the
//! controllers act on them.

use std::collections::BTreeSet;

use fanfare_cluster_tests::control_plane::{ControlPlane, Namespace, chart};
use serde_json::{Value, json};

const THREE: [&str; 4] = ["--set", "replicas=3,store.kind=none", "--timeout", "120s"];

fn install(namespace: &Namespace<'_>, with: &[&str]) {
    let chart = chart();
    let chart = chart.to_str().expect("a path");
    namespace.helm(&[&["install", "fanfare", chart, "--wait"], &THREE[..], with].concat());
}

fn ready(namespace: &Namespace<'_>) -> u64 {
    namespace.get("statefulset/fanfare")["status"]["readyReplicas"].as_u64().unwrap_or(0)
}

fn secret(namespace: &Namespace<'_>, name: &str) -> Value {
    namespace.get(&format!("secret/{name}"))["data"].take()
}

#[test]
fn upgrade_replaces_one_pod_at_a_time_and_keeps_secrets() {
    let Some(kubernetes) = ControlPlane::shared() else { return };
    let namespace = kubernetes.namespace("upgrade");
    let slow = ["--set", "podAnnotations.fanfare\\.test/ready-after=1s"];
    install(&namespace, &slow);
    let secrets = ["fanfare-cluster-key", "fanfare-admin-token", "fanfare-directory"];
    let before = secrets.map(|name| secret(&namespace, name));
    let chart = chart();
    let change =
        ["upgrade", "fanfare", chart.to_str().expect("a path"), "--wait", "--set", "config.log=debug"];
    let mut upgrade = namespace.begin_helm(&[&change, &THREE[..], &slow].concat());
    let mut least = 3;
    while upgrade.try_wait().expect("a child").is_none() {
        least = least.min(ready(&namespace));
    }
    assert!(upgrade.wait().expect("ended").success());
    assert_eq!(least, 2, "one pod at a time is not ready");
    assert_eq!(secrets.map(|name| secret(&namespace, name)), before);
    let config = || namespace.get("pod/fanfare-0")["metadata"]["annotations"]["fanfare.toml"].take();
    assert!(config().as_str().is_some_and(|text| text.contains("log = \"debug\"")), "{}", config());
    namespace.helm(&["rollback", "fanfare", "1", "--wait", "--timeout", "120s"]);
    assert!(config().as_str().is_some_and(|text| !text.contains("log =")), "{}", config());
    assert_eq!(ready(&namespace), 3);
    namespace.helm(&["test", "fanfare", "--timeout", "60s"]);
}

#[test]
fn second_eviction_is_beyond_the_budget() {
    let Some(kubernetes) = ControlPlane::shared() else { return };
    let namespace = kubernetes.namespace("eviction");
    install(&namespace, &["--set", "podAnnotations.fanfare\\.test/gone-after=10s"]);
    let evict = |pod: &str| {
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "eviction"}});
        let path = format!("/api/v1/namespaces/eviction/pods/{pod}/eviction");
        namespace.try_kubectl(&["create", "--raw", &path, "--filename", "-"], &eviction.to_string())
    };
    namespace.until("the budget", || {
        namespace.get("poddisruptionbudget/fanfare")["status"]["disruptionsAllowed"] == 1
    });
    let first = evict("fanfare-0");
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let second = evict("fanfare-1");
    let outcome = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && outcome.contains("disruption budget"), "{outcome}");
}

#[test]
fn later_version_of_the_chart_upgrades_an_earlier_one() {
    let Some(kubernetes) = ControlPlane::shared() else { return };
    let namespace = kubernetes.namespace("later");
    install(&namespace, &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let later = folder.path().join("fanfare");
    let copied =
        std::process::Command::new("cp").arg("-r").arg(chart()).arg(&later).status().expect("copied");
    assert!(copied.success());
    let file = later.join("Chart.yaml");
    let text = std::fs::read_to_string(&file).expect("a chart");
    let lines = text.lines().map(|line| match line.split_once(": ") {
        Some(("version", _)) => "version: 9.9.9\n".to_owned(),
        Some(("appVersion", _)) => "appVersion: \"9.9.9\"\n".to_owned(),
        _ => format!("{line}\n"),
    });
    std::fs::write(&file, lines.collect::<String>()).expect("written");
    let later = later.to_str().expect("a path");
    namespace.helm(&[&["upgrade", "fanfare", later, "--wait"], &THREE[..]].concat());
    let image = namespace.get("pod/fanfare-0")["spec"]["containers"][0]["image"].take();
    assert_eq!(image, "fanfare:9.9.9");
}

/// Values under which the chart makes all its objects of built-in kinds.
const ALL: &str = "replicas=3,store.kind=scylla,store.scylla.nodes={db:9042},store.scylla.user=fanfare,\
    store.scylla.passwordSecret.name=db,autoscaling.enabled=true,autoscaling.connections=5000,tls.existingSecret=tls,peerTls.existingSecret=peers,test.host=rt.example.com,test.ca=true,\
    amqp.existingSecret=broker,metrics.dashboard.enabled=true,trustedProxies={10.0.0.0/8},\
    config.limits.connections=100000,priorityClassName=system-cluster-critical";

fn assert_taken(namespace: &Namespace<'_>) {
    for values in [
        ALL,
        "image.tag=v1",
        "replicas=3,store.kind=none,persistence.enabled=false,podDisruptionBudget.enabled=false,ingress.enabled=true,ingress.hosts={rt.example.com},trustedProxies={10.0.0.0/8},proxyProtocol=true",
    ] {
        let chart = chart();
        let chart = chart.to_str().expect("a path");
        let rendered = namespace.helm(&["template", "fanfare", chart, "--set", values]);
        let apply = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename", "-"];
        let taken = namespace.try_kubectl(&apply, &rendered);
        let outcome = String::from_utf8_lossy(&taken.stderr);
        assert!(taken.status.success(), "{values}: {outcome}");
        assert!(!outcome.contains("Warning"), "{values}: {outcome}");
    }
}

#[test]
fn schema_names_each_setting_of_a_node() {
    let read = |path: &str| std::fs::read_to_string(chart().join(path)).expect(path);
    let schema: Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    let config = &schema["properties"]["config"]["properties"];
    let reference = read("../../deploy/fanfare.toml");
    let (settings, limits) = reference.split_once("\n[limits]\n").expect("a table of limits");
    for (section, named) in [(settings, config), (limits, &config["limits"]["properties"])] {
        let names: BTreeSet<&str> = section.lines().filter_map(setting).collect();
        let named = named.as_object().expect("names");
        let known: BTreeSet<&str> =
            named.keys().map(String::as_str).filter(|name| *name != "limits").collect();
        assert_eq!(known, names, "the names under config in values.schema.json are those of fanfare.toml");
    }
}

/// Gives the name of the setting in a line of the reference.
fn setting(line: &str) -> Option<&str> {
    let (name, _) = line.strip_prefix("# ").unwrap_or(line).split_once(" = ")?;
    let is_name = name.chars().all(|char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '_');
    is_name.then_some(name)
}

#[test]
fn api_server_takes_each_object_without_a_warning() {
    let Some(kubernetes) = ControlPlane::shared() else { return };
    assert_taken(&kubernetes.namespace("strict"));
}

#[test]
fn pod_against_the_restricted_standard_is_warned_of() {
    let Some(kubernetes) = ControlPlane::shared() else { return };
    let namespace = kubernetes.namespace("restricted");
    let chart = chart();
    let rendered = namespace.helm(&["template", "fanfare", chart.to_str().expect("a path")]);
    let apply = ["apply", "--server-side", "--dry-run=server", "--filename", "-"];
    let outcome = namespace.try_kubectl(&apply, &rendered.replace("drop: [ALL]", "drop: []"));
    assert!(
        String::from_utf8_lossy(&outcome.stderr).contains("violate PodSecurity"),
        "the check of a warning can fail"
    );
}

#[test]
fn older_minors_of_the_api_take_each_object() {
    for minor in ["1.33", "1.34", "1.35"] {
        let Some(kubernetes) = ControlPlane::start(Some(minor)) else { return };
        assert_taken(&kubernetes.namespace("older"));
    }
}
