//! Accounts: tenants, accounts and keys with their rules, read from one watched file.

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
pub use connections::{QuotaSlot, TenantConnections};
pub use directory::{
    Account, CUT_MS, ChannelPolicy, ChannelRule, Directory, Integration, IntegrationKind, IntegrationTarget,
    Key, Tenant,
};
pub use parse::is_key_name;
pub use reader::{DirectoryError, DirectoryMistake};
pub use secret::Secret;
pub use usages::Usages;
pub use watch::Accounts;
pub use webhook::WebhookTarget;
