//! Nodes in the pods of a Kubernetes. A cluster takes some two gigabytes of memory, so few of these tests run at once.

mod chart;
mod pods_run;
