//! Figures from the admin listener of a node.

use super::server::Server;
use crate::Result;
use crate::wire::http::Http;

/// Connection to the admin listener of one node.
pub(super) struct Admin(Http);

impl Admin {
    pub(super) fn of(node: &Server) -> Result<Self> {
        Ok(Self(Http::connect(node.node_file()?.admin, None)?))
    }

    /// Value of a metric without labels; 0 if the page does not have it.
    pub(super) fn metric(&mut self, name: &str) -> Result<f64> {
        let page = self.0.get("/metrics")?.success("the metrics")?;
        let text = String::from_utf8_lossy(&page).into_owned();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(value.map(str::parse).transpose()?.unwrap_or(0.0))
    }
}
