//! Moto, which simulates SNS, SQS, Lambda, IAM and STS of AWS.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_proto::path::encode_channel;
use serde_json::{Value, json};

use crate::{Response, http};

const REGION: &str = "eu-west-1";
const ACCOUNT: &str = "123456789012";
/// An archive without files.
const EMPTY_ZIP: &[u8] = b"PK\x05\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// A server of a test's own, which ends with it. It starts without checks of signatures and permissions.
pub struct Moto {
    addr: SocketAddr,
    invocations: Arc<Mutex<Vec<Value>>>,
    process: Child,
}

/// Access keys of a user or a role.
#[derive(Debug, Clone)]
pub struct Keys {
    pub id: String,
    pub secret: String,
}

impl Moto {
    /// Starts a server; `None` if it cannot be installed, which `CI=true` forbids.
    pub fn start() -> Option<Self> {
        let python = python()?;
        let mut process = Command::new(python)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("aws/serve.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("python runs");
        let lines = BufReader::new(process.stdout.take().expect("its output"));
        let mut lines = lines
            .lines()
            .map_while(Result::ok)
            .map(|line| serde_json::from_str::<Value>(&line).expect("a line of JSON"));
        let port = lines.next().and_then(|line| line["port"].as_u64()).expect("a port");
        let invocations = Arc::<Mutex<Vec<Value>>>::default();
        let kept = Arc::clone(&invocations);
        std::thread::spawn(move || {
            lines.for_each(|line| kept.lock().unwrap_or_else(PoisonError::into_inner).push(line));
        });
        let addr = SocketAddr::from(([127, 0, 0, 1], u16::try_from(port).expect("a port")));
        Some(Self { addr, invocations, process })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn arn(service: &str, resource: &str) -> String {
        let region = if service == "iam" { "" } else { REGION };
        format!("arn:aws:{service}:{region}:{ACCOUNT}:{resource}")
    }

    /// Sets whether the server checks the signature and the permission of each request.
    pub async fn ask_for_permission(&self, asks: bool) {
        let free_requests = if asks { "0" } else { "inf" };
        let headers = [("content-type", "text/plain")];
        let answer = http::request(self.addr, "POST", "/moto-api/reset-auth", &headers, free_requests).await;
        assert_eq!(answer.status, 200);
    }

    /// Makes a topic, and a queue that gets its messages in their raw form. `.fifo` ends both names or none. Gives the
    /// URL of the queue.
    pub async fn topic_with_queue(&self, topic: &str, queue: &str) -> String {
        let is_fifo = topic.ends_with(".fifo");
        let mut parameters = vec![("Action", "CreateTopic"), ("Name", topic)];
        if is_fifo {
            parameters
                .extend([("Attributes.entry.1.key", "FifoTopic"), ("Attributes.entry.1.value", "true")]);
        }
        self.query("sns", &parameters).await;
        let attributes = if is_fifo { json!({"FifoQueue": "true"}) } else { json!({}) };
        let made = self.sqs("CreateQueue", &json!({"QueueName": queue, "Attributes": attributes})).await;
        let parameters = [
            ("Action", "Subscribe"),
            ("TopicArn", &Self::arn("sns", topic)),
            ("Protocol", "sqs"),
            ("Endpoint", &Self::arn("sqs", queue)),
            ("Attributes.entry.1.key", "RawMessageDelivery"),
            ("Attributes.entry.1.value", "true"),
        ];
        self.query("sns", &parameters).await;
        made["QueueUrl"].as_str().expect("an address").to_owned()
    }

    /// Receives messages of a queue, ten at most.
    pub async fn receive(&self, queue_url: &str) -> Vec<Value> {
        let request = json!({
            "QueueUrl": queue_url, "MaxNumberOfMessages": 10, "MessageAttributeNames": ["All"], "AttributeNames": ["All"],
        });
        let mut received = self.sqs("ReceiveMessage", &request).await;
        let messages = received["Messages"].as_array_mut().map(std::mem::take).unwrap_or_default();
        for message in &messages {
            let handle = &message["ReceiptHandle"];
            self.sqs("DeleteMessage", &json!({"QueueUrl": queue_url, "ReceiptHandle": handle})).await;
        }
        messages
    }

    /// Makes a function, which is recorded and not run. The role is not checked.
    pub async fn function(&self, name: &str) {
        self.role("lambda").await;
        let body = json!({
            "FunctionName": name, "Runtime": "python3.12", "Handler": "a.b", "Role": Self::arn("iam", "role/lambda"),
            "Code": {"ZipFile": STANDARD.encode(EMPTY_ZIP)},
        });
        let authorization = unsigned("lambda");
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        let answer =
            http::request(self.addr, "POST", "/2015-03-31/functions", &headers, body.to_string()).await;
        assert_eq!(answer.status, 201, "{:?}", answer.body);
    }

    /// Gives the invocations, each with `function`, `type` and `body`.
    pub fn invocations(&self) -> Vec<Value> {
        self.invocations.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a user without permissions.
    pub async fn user(&self, name: &str) -> Keys {
        self.query("iam", &[("Action", "CreateUser"), ("UserName", name)]).await;
        let made = self.query("iam", &[("Action", "CreateAccessKey"), ("UserName", name)]).await;
        let element = |name| element(&made, name).expect("an element").to_owned();
        Keys { id: element("AccessKeyId"), secret: element("SecretAccessKey") }
    }

    /// Makes a role without permissions, which every user may assume that has the permission to assume roles.
    pub async fn role(&self, name: &str) {
        let statement = json!({"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"});
        let policy = json!({"Version": "2012-10-17", "Statement": [statement]}).to_string();
        let parameters =
            [("Action", "CreateRole"), ("RoleName", name), ("AssumeRolePolicyDocument", &policy)];
        self.query("iam", &parameters).await;
    }

    pub async fn allow_user(&self, name: &str, actions: &[&str]) {
        self.allow("PutUserPolicy", "UserName", name, actions).await;
    }

    pub async fn allow_role(&self, name: &str, actions: &[&str]) {
        self.allow("PutRolePolicy", "RoleName", name, actions).await;
    }

    async fn allow(&self, call: &str, of: &str, name: &str, actions: &[&str]) {
        let statement = json!({"Effect": "Allow", "Action": actions, "Resource": "*"});
        let policy = json!({"Version": "2012-10-17", "Statement": [statement]}).to_string();
        let parameters = [("Action", call), (of, name), ("PolicyName", "own"), ("PolicyDocument", &policy)];
        self.query("iam", &parameters).await;
    }

    async fn query(&self, service: &str, parameters: &[(&str, &str)]) -> String {
        let encoded = parameters.iter().map(|(name, value)| format!("{name}={}", encode_channel(value)));
        let body = encoded.collect::<Vec<_>>().join("&");
        let headers = [("content-type", "application/x-www-form-urlencoded")];
        let answer = self.post(service, &headers, body).await;
        String::from_utf8(answer.body.to_vec()).expect("a text")
    }

    async fn sqs(&self, call: &str, body: &Value) -> Value {
        let target = format!("AmazonSQS.{call}");
        let headers = [("content-type", "application/x-amz-json-1.0"), ("x-amz-target", target.as_str())];
        self.post("sqs", &headers, body.to_string()).await.json()
    }

    async fn post(&self, service: &str, headers: &[(&str, &str)], body: String) -> Response {
        let authorization = unsigned(service);
        let headers = [headers, &[("authorization", authorization.as_str())]].concat();
        let answer = http::request(self.addr, "POST", "/", &headers, body).await;
        assert_eq!(answer.status, 200, "{service}: {:?}", answer.body);
        answer
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

/// Gives the header of a request that names the service and is not signed.
fn unsigned(service: &str) -> String {
    format!(
        "AWS4-HMAC-SHA256 Credential=x/20260101/{REGION}/{service}/aws4_request, SignedHeaders=host, Signature=x"
    )
}

fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(inside, _)| inside)
}

/// Gives the Python interpreter with moto.
fn python() -> Option<&'static str> {
    static PYTHON: OnceLock<Option<String>> = OnceLock::new();
    let python = PYTHON.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("aws/moto.sh");
        let installed = Command::new(script).stdin(Stdio::null()).output().expect("a shell");
        if !installed.status.success() {
            let why = String::from_utf8_lossy(&installed.stderr);
            crate::not_run(&format!("moto cannot be installed: {why}"));
            return None;
        }
        Some(String::from_utf8(installed.stdout).expect("a path").trim_end().to_owned())
    });
    if python.is_none() {
        crate::not_run("there is no moto to test with");
    }
    python.as_deref()
}
