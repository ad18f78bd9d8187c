//! The credential of a client, and the source of its tokens.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::time::timeout;

use crate::answer::{TokenAnswer, no_token};
use crate::auth_url::AuthUrl;
use crate::{Error, Options};

/// Greatest time for a function of the application.
const FETCH_MAX: Duration = Duration::from_secs(10);

/// A credential, sent in the `authorization` header and never in the address. `Debug` does not show it.
#[derive(Clone)]
pub enum Credential {
    /// API key `<secret>.<keyName>`, sent as Basic.
    Key(String),
    /// Service JWT, sent as Bearer.
    Token(String),
    /// Tokens from the application, sent as Bearer: one for the first connection and for each resume of a
    /// lost one, another whenever the node asks for one or refuses the last.
    TokensFrom(TokenSource),
    /// No credential, for a node that runs with `auth = off`.
    None,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key(_) => "Key(…)",
            Self::Token(_) => "Token(…)",
            Self::TokensFrom(_) => "TokensFrom(…)",
            Self::None => "None",
        })
    }
}

type TokenFuture = Pin<Box<dyn Future<Output = Result<TokenAnswer, FetchError>> + Send>>;
/// Reason for which the application gives no token, in its own words.
pub type FetchError = Box<dyn std::error::Error + Send + Sync>;

/// A function or an address of the application that gives tokens.
///
/// If it fails, an open connection goes on until its token expires, with [`crate::Event::AuthRequired`], and
/// a lost connection is tried again later. [`Error::TokenDenied`] is final: no connection is tried after it.
#[derive(Clone)]
pub struct TokenSource(SourceKind);

#[derive(Clone)]
enum SourceKind {
    Function(Arc<dyn Fn() -> TokenFuture + Send + Sync>),
    Url(Arc<AuthUrl>),
}

impl TokenSource {
    /// Makes a source of a function that gives a [`TokenAnswer`], or the text of a JWT, within 10 s. If its
    /// error is an [`Error::TokenDenied`], no connection is tried after it.
    pub fn new<F, T, A>(fetch: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<A, FetchError>> + Send + 'static,
        A: Into<TokenAnswer>,
    {
        let asked = move || -> TokenFuture {
            let answer = fetch();
            Box::pin(async { answer.await.map(Into::into) })
        };
        Self(SourceKind::Function(Arc::new(asked)))
    }

    /// Makes a source of an address. Its status 403 is [`Error::TokenDenied`]; any other answer without a
    /// token is [`Error::NoToken`].
    pub fn auth_url(url: AuthUrl) -> Self {
        Self(SourceKind::Url(Arc::new(url)))
    }

    /// Gets a token for the connection of `options`.
    pub(crate) async fn fetch(&self, options: &Options) -> Result<String, Error> {
        let answer = match &self.0 {
            SourceKind::Function(fetch) => timeout(FETCH_MAX, fetch())
                .await
                .map_err(|_| no_token(format!("the application gave none within {} s", FETCH_MAX.as_secs())))?
                .map_err(unfetched)?,
            SourceKind::Url(url) => url.ask(options.client_id.as_deref()).await?,
        };
        answer.into_token(options).await
    }
}

fn unfetched(error: FetchError) -> Error {
    match error.downcast::<Error>() {
        Ok(error) if matches!(*error, Error::TokenDenied(_)) => *error,
        Ok(error) => Error::NoToken(error.to_string()),
        Err(error) => Error::NoToken(error.to_string()),
    }
}

/// The credential of the next connection.
pub(crate) struct CurrentCredential {
    options: Arc<Options>,
    /// Latest token: fetched from the source, or given by the application for a refresh.
    token: Option<String>,
}

impl CurrentCredential {
    pub(crate) fn new(options: Arc<Options>) -> Self {
        Self { options, token: None }
    }

    pub(crate) fn source(&self) -> Option<&TokenSource> {
        match &self.options.credential {
            Credential::TokensFrom(source) => Some(source),
            _ => None,
        }
    }

    /// Fetches a token if there is a source and no token of it.
    pub(crate) async fn fill(&mut self) -> Result<(), Error> {
        if self.token.is_none()
            && let Some(source) = self.source()
        {
            self.token = Some(source.fetch(&self.options).await?);
        }
        Ok(())
    }

    /// Drops the latest token, which the node refuses. Gives `false` if no other can be had.
    pub(crate) fn discard(&mut self) -> bool {
        self.source().is_some() && self.token.take().is_some()
    }

    /// Prepares the credential for a resume. A source is asked again; without one, `given` is the newest
    /// token of the application.
    pub(crate) fn renew(&mut self, given: Option<String>) {
        if self.source().is_some() {
            self.token = None;
        } else if given.is_some() {
            self.token = given;
        }
    }

    /// Gives the value of the `authorization` header.
    pub(crate) fn header(&self) -> Option<String> {
        match (&self.token, &self.options.credential) {
            (Some(token), _) | (None, Credential::Token(token)) => Some(format!("Bearer {token}")),
            (None, Credential::Key(key)) => Some(format!("Basic {}", STANDARD.encode(key))),
            (None, Credential::TokensFrom(_) | Credential::None) => None,
        }
    }
}
