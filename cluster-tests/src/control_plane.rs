//! A real Kubernetes control plane with simulated nodes, which the script `kubernetes/cluster` starts.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Timeout for anything that the API server, the scheduler and the controllers do.
const SOON: Duration = Duration::from_secs(60);

/// A control plane, which ends with this process, even if that is killed.
pub struct ControlPlane {
    name: String,
    /// Minor version of the emulated API; `None`: the newest.
    minor: Option<&'static str>,
    kubeconfig: PathBuf,
    tools: PathBuf,
    _keeper: Child,
}

/// A namespace of a test's own, under the restricted pod security standard.
pub struct Namespace<'a> {
    of: &'a ControlPlane,
    name: String,
}

/// The chart of this repository.
pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm/fanfare")
}

impl ControlPlane {
    /// Gives the control plane of this process, or `None` if it cannot be built, which `CI=true` forbids.
    /// Blocks.
    pub fn shared() -> Option<&'static Self> {
        static STARTED: OnceLock<Option<ControlPlane>> = OnceLock::new();
        STARTED.get_or_init(|| Self::start(None)).as_ref()
    }

    /// Starts a control plane of the test's own. Blocks.
    pub fn start(minor: Option<&'static str>) -> Option<Self> {
        let name = format!("test-{}-{}", std::process::id(), minor.unwrap_or("newest"));
        let up = script(&name, minor, "up").output().expect("the script can be started");
        if !up.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&up.stderr));
            crate::not_run("Kubernetes cannot be built or started");
            return None;
        }
        // The program ends the cluster when its input closes.
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes/cluster");
        let mut keeper = Command::new("sh");
        keeper.args(["-c", "cat >/dev/null; \"$0\" down"]).arg(program);
        keeper.env("FANFARE_KUBERNETES_NAME", &name).stdin(Stdio::piped());
        let keeper = std::os::unix::process::CommandExt::process_group(&mut keeper, 0);
        let keeper = keeper.spawn().expect("a shell can be started");
        let printed = script(&name, minor, "env").output().expect("the script can be started");
        let printed = String::from_utf8(printed.stdout).expect("text");
        let quoted = |variable: &str| {
            let (_, rest) = printed.split_once(&format!("{variable}='")).expect("a variable");
            PathBuf::from(rest.split_once('\'').expect("its end").0)
        };
        Some(Self { kubeconfig: quoted("KUBECONFIG"), tools: quoted("PATH"), name, minor, _keeper: keeper })
    }

    /// Makes a namespace.
    pub fn namespace(&self, name: &str) -> Namespace<'_> {
        let namespace = Namespace { of: self, name: name.to_owned() };
        self.run("kubectl", &["create", "namespace", name]);
        let label = "pod-security.kubernetes.io/enforce=restricted";
        self.run("kubectl", &["label", "namespace", name, label]);
        namespace
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.tools.join(program));
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null());
        command
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program, arguments).output().expect("the program can be started");
        let printed = String::from_utf8_lossy(&output.stderr);
        let (name, minor) = (&self.name, self.minor);
        assert!(output.status.success(), "{name} {minor:?}: {program} {arguments:?}: {printed}");
        String::from_utf8(output.stdout).expect("text")
    }
}

impl Namespace<'_> {
    fn arguments<'b>(&'b self, arguments: &[&'b str]) -> Vec<&'b str> {
        [&["--namespace", &*self.name], arguments].concat()
    }

    /// Runs `kubectl` and gives its output; the test fails with it.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.of.run("kubectl", &self.arguments(arguments))
    }

    /// Runs `helm` and gives its output; the test fails with it.
    pub fn helm(&self, arguments: &[&str]) -> String {
        self.of.run("helm", &self.arguments(arguments))
    }

    /// Starts `helm` without waiting for its end.
    pub fn begin_helm(&self, arguments: &[&str]) -> Child {
        let mut command = self.of.command("helm", &self.arguments(arguments));
        command.stdout(Stdio::null()).spawn().expect("the program can be started")
    }

    /// Runs `kubectl`, and gives its output whether or not it fails.
    pub fn try_kubectl(&self, arguments: &[&str], input: &str) -> Output {
        use std::io::Write as _;
        let mut command = self.of.command("kubectl", &self.arguments(arguments));
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = piped.spawn().expect("the program can be started");
        let mut stdin = running.stdin.take().expect("piped");
        stdin.write_all(input.as_bytes()).expect("it reads");
        drop(stdin);
        running.wait_with_output().expect("it ends")
    }

    /// Gives an object of the API server.
    pub fn get(&self, object: &str) -> Value {
        serde_json::from_str(&self.kubectl(&["get", object, "--output", "json"])).expect("JSON")
    }

    /// Waits until `is_so` gives true.
    pub fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < SOON, "{what}: {}", self.kubectl(&["get", "pods"]));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn script(name: &str, minor: Option<&str>, command: &str) -> Command {
    let mut script = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes/cluster"));
    script.arg(command).env("FANFARE_KUBERNETES_NAME", name).stdin(Stdio::null());
    script.env("FANFARE_KUBERNETES_EMULATE", minor.unwrap_or_default());
    script
}
