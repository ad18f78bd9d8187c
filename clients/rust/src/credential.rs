//! As whom to connect.

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

/// For a function of the application.
const FETCH_MAX: Duration = Duration::from_secs(10);

/// Sent in the `authorization` header, never in the address. `Debug` does not show it.
#[derive(Clone)]
pub enum Credential {
    /// `<secret>.<keyName>`, sent as Basic.
    Key(String),
    /// A service JWT, sent as Bearer.
    Token(String),
    /// Tokens from the application, sent as Bearer: one for the first connection and for each time that a lost one is taken up,
    /// another whenever the node asks for one or refuses the last.
    TokensFrom(TokenSource),
    /// For a node that runs with `auth = off`.
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

type Fetched = Pin<Box<dyn Future<Output = Result<TokenAnswer, FetchError>> + Send>>;
/// Why there is no token, in the application's words.
pub type FetchError = Box<dyn std::error::Error + Send + Sync>;

/// The application's side of the token flow: a function or an address that is asked for each token.
///
/// When it fails, an open connection goes on until its token expires, with [`crate::Event::AuthRequired`]; a lost connection
/// is tried again later. [`Error::TokenDenied`] is final: no connection is tried after it.
#[derive(Clone)]
pub struct TokenSource(Asked);

#[derive(Clone)]
enum Asked {
    Function(Arc<dyn Fn() -> Fetched + Send + Sync>),
    Url(Arc<AuthUrl>),
}

impl TokenSource {
    /// `fetch` gives a [`TokenAnswer`], or the text of a JWT, within 10 s. An [`Error::TokenDenied`] of its own is final, as is
    /// status 403 of an auth URL.
    pub fn new<F, T, A>(fetch: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<A, FetchError>> + Send + 'static,
        A: Into<TokenAnswer>,
    {
        let asked = move || -> Fetched {
            let answer = fetch();
            Box::pin(async { answer.await.map(Into::into) })
        };
        Self(Asked::Function(Arc::new(asked)))
    }

    /// Asks an address of the application. Its status 403 is [`Error::TokenDenied`], all else that is no token is
    /// [`Error::NoToken`].
    pub fn auth_url(url: AuthUrl) -> Self {
        Self(Asked::Url(Arc::new(url)))
    }

    /// A token for the connection of `options`.
    pub(crate) async fn fetch(&self, options: &Options) -> Result<String, Error> {
        let answer = match &self.0 {
            Asked::Function(fetch) => timeout(FETCH_MAX, fetch())
                .await
                .map_err(|_| no_token(format!("the application gave none within {} s", FETCH_MAX.as_secs())))?
                .map_err(unfetched)?,
            Asked::Url(url) => url.ask(options.client_id.as_deref()).await?,
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

/// The credential as it is at the moment.
pub(crate) struct Wallet {
    options: Arc<Options>,
    /// The latest token: fetched, or given by the application for a refresh.
    token: Option<String>,
}

impl Wallet {
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

    /// The latest token is no good any more; false when there is no other to be had.
    pub(crate) fn discard(&mut self) -> bool {
        self.source().is_some() && self.token.take().is_some()
    }

    /// A connection is lost. A source is asked again for the next one; without a source, `given` is the newest token of the
    /// application, if there is one.
    pub(crate) fn renew(&mut self, given: Option<String>) {
        if self.source().is_some() {
            self.token = None;
        } else if given.is_some() {
            self.token = given;
        }
    }

    /// The value of the `authorization` header.
    pub(crate) fn header(&self) -> Option<String> {
        match (&self.token, &self.options.credential) {
            (Some(token), _) | (None, Credential::Token(token)) => Some(format!("Bearer {token}")),
            (None, Credential::Key(key)) => Some(format!("Basic {}", STANDARD.encode(key))),
            (None, Credential::TokensFrom(_) | Credential::None) => None,
        }
    }
}
