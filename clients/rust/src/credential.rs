//! As whom to connect.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::Error;

/// Sent in the `authorization` header, never in the address. `Debug` does not show it.
#[derive(Clone)]
pub enum Credential {
    /// `<secret>.<keyName>`, sent as Basic.
    Key(String),
    /// A service JWT, sent as Bearer.
    Token(String),
    /// Service JWTs from the application, sent as Bearer: the first one for the first connection, another whenever the node
    /// asks for one or refuses the last.
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

type Fetched = Pin<Box<dyn Future<Output = Result<String, FetchError>> + Send>>;
/// Why there is no token, in the application's words.
pub type FetchError = Box<dyn std::error::Error + Send + Sync>;

/// Where an application gets its tokens: a function that is called for each.
#[derive(Clone)]
pub struct TokenSource(Arc<dyn Fn() -> Fetched + Send + Sync>);

impl TokenSource {
    /// `fetch` gives a service JWT. When it fails, a connection that is open goes on until its token expires, with
    /// [`crate::Event::AuthRequired`]; one that is lost is tried again later.
    pub fn new<F, T>(fetch: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<String, FetchError>> + Send + 'static,
    {
        Self(Arc::new(move || Box::pin(fetch())))
    }

    pub(crate) async fn fetch(&self) -> Result<String, Error> {
        (self.0)().await.map_err(|error| Error::NoToken(error.to_string()))
    }
}

/// The credential as it is at the moment.
pub(crate) struct Wallet {
    credential: Credential,
    /// The latest token: fetched, or given by the application for a refresh.
    token: Option<String>,
}

impl Wallet {
    pub(crate) fn new(credential: Credential) -> Self {
        Self { credential, token: None }
    }

    pub(crate) fn source(&self) -> Option<&TokenSource> {
        match &self.credential {
            Credential::TokensFrom(source) => Some(source),
            _ => None,
        }
    }

    /// Fetches a token if there is a source and no token of it; true if it did.
    pub(crate) async fn fill(&mut self) -> Result<bool, Error> {
        match &self.credential {
            Credential::TokensFrom(source) if self.token.is_none() => {
                self.token = Some(source.fetch().await?);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// The latest token is no good any more; false when there is no other to be had.
    pub(crate) fn discard(&mut self) -> bool {
        self.source().is_some() && self.token.take().is_some()
    }

    pub(crate) fn put(&mut self, token: String) {
        self.token = Some(token);
    }

    /// The value of the `authorization` header.
    pub(crate) fn header(&self) -> Option<String> {
        match (&self.token, &self.credential) {
            (Some(token), _) | (None, Credential::Token(token)) => Some(format!("Bearer {token}")),
            (None, Credential::Key(key)) => Some(format!("Basic {}", STANDARD.encode(key))),
            (None, Credential::TokensFrom(_) | Credential::None) => None,
        }
    }
}
