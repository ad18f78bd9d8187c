//! Who may use the service and under which rules: tenants, accounts and keys, read from one watched file.

mod amqp;
mod aws;
mod connections;
pub mod development;
mod directory;
mod parse;
mod reach;
mod reader;
mod secret;
#[cfg(test)]
mod tests;
mod usages;
mod watch;
mod webhook;

pub use amqp::{AmqpTarget, TemplateValues};
pub use aws::{
    AwsAccess, AwsBatching, AwsCredentials, AwsEndpoint, AwsKeys, AwsRole, LambdaTarget, SnsTarget,
};
pub use connections::{Seat, TenantConnections};
pub use directory::{
    Account, CUT_MS, ChannelPolicy, ChannelRule, Directory, Integration, IntegrationKind, Key, Target, Tenant,
};
pub use parse::is_key_name;
pub use reader::{DirectoryError, Mistake};
pub use secret::Secret;
pub use usages::Usages;
pub use watch::Accounts;
pub use webhook::WebhookTarget;
