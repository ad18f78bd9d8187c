//! A Kubernetes whose nodes run pods as processes, in a network of its own; `kubernetes/README.md` says what is real in it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::script::Script;
use crate::{binary, system};

/// Timeout of one command, which may wait for pods to start or to end.
const COMMAND: Duration = Duration::from_secs(120);

/// Address of the host for pods.
pub const HOST: &str = "10.245.0.1";

pub struct Kubernetes {
    script: Script,
    images: TempDir,
    kubeconfig: String,
    /// `PATH` with the folder of `kubectl` and `helm` first.
    path: String,
}

/// Runs a test within the network of a cluster of `nodes` nodes. Skipped on a machine that cannot have one, which is a
/// failure in CI.
pub fn in_cluster(nodes: u8, test: impl AsyncFnOnce(Kubernetes) + Send + 'static) {
    let within = thread::spawn(move || {
        let Some(kubernetes) = Kubernetes::start(nodes) else {
            system::not_run("Kubernetes cannot be started, which takes root and Go");
            return;
        };
        // All must run on this thread, since it alone is in the network.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(test(kubernetes));
    });
    if let Err(panic) = within.join() {
        std::panic::resume_unwind(panic);
    }
}

impl Kubernetes {
    /// Puts this thread into the network of the cluster.
    fn start(nodes: u8) -> Option<Self> {
        let script = Script::new("kubernetes/cluster", &["down"]);
        let images = tempfile::tempdir().expect("a temporary folder");
        let folder = images.path().to_str().expect("a path in UTF-8");
        let environment =
            [("FANFARE_KUBERNETES_RUN", &*nodes.to_string()), ("FANFARE_KUBERNETES_IMAGES", folder)];
        script.run_with(&environment, &["up"])?;
        let network = File::open(script.run(&["network"])?).expect("the cluster has a network");
        system::enter_network(&network);
        let environment = script.run(&["env"])?;
        let mut quoted = environment.split('\'').skip(1).step_by(2);
        let mut next = || quoted.next().expect("KUBECONFIG and PATH").to_owned();
        let (kubeconfig, tools) = (next(), next());
        let path = format!("{tools}:{}", std::env::var("PATH").unwrap_or_default());
        let kubernetes = Self { script, images, kubeconfig, path };
        kubernetes.image("fanfare", binary::path());
        Some(kubernetes)
    }

    /// Makes a program the image of this name, for all tags or for the tag in the name.
    pub fn image(&self, name: &str, program: &Path) {
        let file = self.images.path().join(name);
        std::os::unix::fs::symlink(program, file).expect("the folder of images is writable");
    }

    /// Runs `kubectl` and gives its output; the test fails when it does.
    pub async fn kubectl(&self, arguments: &[&str]) -> String {
        self.run("kubectl", arguments, "").await
    }

    /// Creates or changes the objects of a YAML text.
    pub async fn apply(&self, objects: &str) {
        self.run("kubectl", &["apply", "--filename", "-"], objects).await;
    }

    /// Runs `helm` and gives its output; the test fails when it does.
    pub async fn helm(&self, arguments: &[&str]) -> String {
        self.run("helm", arguments, "").await
    }

    /// Waits until the last change of the workload is rolled out and all its pods are ready.
    pub async fn rolled_out(&self, workload: &str) {
        self.kubectl(&["rollout", "status", workload, "--timeout", "100s"]).await;
    }

    pub async fn pod_address(&self, pod: &str) -> String {
        self.kubectl(&["get", "pod", pod, "--output", "jsonpath={.status.podIP}"]).await
    }

    /// Kills the process of a pod of the chart; its kubelet starts it again in place.
    pub fn kill(&self, pod: &str) {
        let process = self.process(pod).expect("the pod runs");
        let killed = std::process::Command::new("kill").args(["-KILL", &process]).status();
        assert!(killed.expect("a command").success(), "process {process} of {pod}");
    }

    /// Gives the variables of the node process of a pod, as `NAME=value`.
    pub fn environment(&self, pod: &str) -> Vec<String> {
        let process = self.process(pod).expect("the pod runs");
        let environment = std::fs::read(Path::new("/proc").join(process).join("environ")).expect("it runs");
        String::from_utf8_lossy(&environment).split_terminator('\0').map(str::to_owned).collect()
    }

    /// Finds the node process of a pod, by the pod's name in its environment and its files in the folder of this
    /// cluster.
    fn process(&self, pod: &str) -> Option<String> {
        let names = ["FANFARE_NODE_ID", "POD_NAME"].map(|variable| format!("{variable}={pod}").into_bytes());
        let folder = self.script.folder().to_str().expect("a path in UTF-8").trim_start_matches('/');
        let is_it = |process: &Path| {
            let read = |file| std::fs::read(process.join(file)).unwrap_or_default();
            let environment = read("environ");
            environment.split(|byte| *byte == 0).any(|entry| names.iter().any(|name| name == entry))
                && String::from_utf8_lossy(&read("mountinfo")).contains(folder)
        };
        let processes = std::fs::read_dir("/proc").expect("processes").flatten();
        let found = processes.map(|entry| entry.path()).find(|process| is_it(process))?;
        Some(found.file_name()?.to_str()?.to_owned())
    }

    /// Kills a node of Kubernetes with its pods. Blocks.
    pub fn crash(&self, node: u8) {
        assert!(self.script.run(&["crash", &node.to_string()]).is_some(), "node {node} ends");
    }

    /// Starts a node of Kubernetes after [`Kubernetes::crash`]. Blocks.
    pub fn revive(&self, node: u8) {
        let folder = self.images.path().to_str().expect("a path in UTF-8");
        let images = [("FANFARE_KUBERNETES_IMAGES", folder)];
        assert!(
            self.script.run_with(&images, &["revive", &node.to_string()]).is_some(),
            "node {node} starts"
        );
    }

    async fn run(&self, program: &str, arguments: &[&str], input: &str) -> String {
        let program = self.program(program);
        let mut running = Command::new(&program)
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("PATH", &self.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it is there since the cluster runs");
        let mut stdin = running.stdin.take().expect("piped");
        stdin.write_all(input.as_bytes()).await.expect("the command reads");
        drop(stdin);
        let ended = tokio::time::timeout(COMMAND, running.wait_with_output()).await;
        let output = ended.expect("a command in time").expect("a child process");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        assert!(output.status.success(), "{program:?} {arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn program(&self, name: &str) -> PathBuf {
        let (tools, _) = self.path.split_once(':').expect("several folders");
        Path::new(tools).join(name)
    }
}
