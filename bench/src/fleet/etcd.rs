//! What etcd has served, by its own counters.

use std::time::Instant;

use anyhow::{Context, ensure};
use vmferry_etcd_lab::EtcdCluster;

/// What all members of a cluster have served since they were started.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Transactions, with an effect or without. Each counts once, at the member that was asked.
    /// `etcd_mvcc_txn_total` counts changes of several keys instead, at each member.
    pub transactions: f64,
    /// Reads of keys and ranges.
    pub reads: f64,
    /// Messages of all requests and streams.
    pub requests: f64,
    /// Bytes from clients.
    pub received_bytes: f64,
    /// Bytes to clients.
    pub sent_bytes: f64,
    /// When the counters were read.
    pub at: Instant,
}

impl Served {
    /// Reads the counters of all members. This is not a request of gRPC, so it is not counted.
    pub fn by(etcd: &EtcdCluster) -> anyhow::Result<Self> {
        let all = etcd.metrics().context("etcd's metrics can't be read")?;
        let sum = |name: &str, label: &str| -> anyhow::Result<f64> {
            all.iter().map(|metrics| total(metrics, name, label)).sum()
        };
        Ok(Self {
            transactions: sum("grpc_server_handled_total", "grpc_method=\"Txn\"")?,
            reads: sum("grpc_server_handled_total", "grpc_method=\"Range\"")?,
            requests: sum("grpc_server_msg_received_total", "")?,
            received_bytes: sum("etcd_network_client_grpc_received_bytes_total", "")?,
            sent_bytes: sum("etcd_network_client_grpc_sent_bytes_total", "")?,
            at: Instant::now(),
        })
    }

    /// What was served since `before`, and in how many seconds.
    pub fn since(&self, before: &Self) -> Traffic {
        Traffic {
            seconds: self.at.duration_since(before.at).as_secs_f64(),
            transactions: self.transactions - before.transactions,
            reads: self.reads - before.reads,
            requests: self.requests - before.requests,
            received_bytes: self.received_bytes - before.received_bytes,
            sent_bytes: self.sent_bytes - before.sent_bytes,
        }
    }
}

/// What etcd has served in some time.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    pub seconds: f64,
    pub transactions: f64,
    pub reads: f64,
    pub requests: f64,
    pub received_bytes: f64,
    pub sent_bytes: f64,
}

/// The sum of a counter over its labels, of those that contain `label`.
fn total(metrics: &str, name: &str, label: &str) -> anyhow::Result<f64> {
    let mut found = false;
    let mut sum = 0.0;
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix(name).filter(|rest| rest.starts_with(['{', ' '])) else {
            continue;
        };
        found = true;
        let (labels, value) = rest.rsplit_once(' ').context("a counter has no value")?;
        if labels.contains(label) {
            sum += value.parse::<f64>().with_context(|| line.to_owned())?;
        }
    }
    ensure!(found, "etcd has no counter {name}");
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_sums_a_counter_over_its_labels() {
        let metrics = "# TYPE handled counter\nhandled{method=\"Txn\",code=\"OK\"} 3\n\
                       handled{method=\"Txn\",code=\"Unknown\"} 2\nhandled{method=\"Range\"} 7\n\
                       handled_total{method=\"Txn\"} 100\nbytes 1.5e+06\n";
        assert_eq!(total(metrics, "handled", "method=\"Txn\"").unwrap(), 5.0);
        assert_eq!(total(metrics, "handled", "").unwrap(), 12.0);
        assert_eq!(total(metrics, "bytes", "").unwrap(), 1.5e6);
        assert!(total(metrics, "absent", "").is_err());
    }
}
