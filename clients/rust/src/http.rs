//! One HTTP request on a connection of its own.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use crate::Error;
use crate::target::Target;

const ANSWER_BYTES_MAX: usize = 64 * 1024;
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Sends a request and gives the body of its answer. A status other than 2xx is [`Error::Http`].
pub(crate) async fn call(
    target: &Target,
    authorities: Option<&[u8]>,
    request: Request<Full<Bytes>>,
) -> Result<Bytes, Error> {
    timeout(ANSWER_MAX, call_unbounded(target, authorities, request)).await.unwrap_or(Err(Error::TimedOut))
}

#[cfg_attr(not(feature = "tls"), expect(unused_variables, reason = "only TLS has authorities"))]
async fn call_unbounded(
    target: &Target,
    authorities: Option<&[u8]>,
    request: Request<Full<Bytes>>,
) -> Result<Bytes, Error> {
    let stream = target.connect().await?;
    match &target.tls {
        #[cfg(feature = "tls")]
        Some(name) => exchange(crate::tls::connect(stream, name, authorities).await?, request).await,
        _ => exchange(stream, request).await,
    }
}

async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> Result<Bytes, Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| Error::Protocol(format!("{e}")))?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|e| Error::Protocol(format!("{e}")))?;
        if response.status().is_success() { body(response).await } else { Err(refusal(response).await) }
    };
    tokio::pin!(exchange, connection);
    tokio::select! {
        answer = &mut exchange => answer,
        // The end of the answer may be the end of the connection.
        _ = &mut connection => exchange.await,
    }
}

/// Reads the body of an answer, of at most 64 KiB.
async fn body(response: Response<Incoming>) -> Result<Bytes, Error> {
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    body.map(|body| body.to_bytes()).map_err(|error| {
        Error::Protocol(if error.is::<LengthLimitError>() {
            format!("more than {ANSWER_BYTES_MAX} bytes")
        } else {
            error.to_string()
        })
    })
}

/// Makes the error of a refusal, with the texts of its body if it has any.
pub(crate) async fn refusal(response: Response<Incoming>) -> Error {
    #[derive(Deserialize)]
    struct Refusal {
        error: String,
        reason: Option<String>,
    }

    let status = response.status().as_u16();
    let body = body(response).await.unwrap_or_default();
    match serde_json::from_slice::<Refusal>(&body) {
        Ok(Refusal { error, reason }) => Error::Http { status, error, reason },
        Err(_) => Error::Http { status, error: "no error text".into(), reason: None },
    }
}
