//! The daemon's configuration file.

mod admission;
mod owner;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use vmferry::config::compression::{CompressionConfig, CompressionWay};
use vmferry::config::policy::{Admission, Policy};
use vmferry_control::TlsFiles;
use vmferry_proxy::{
    Forward, ForwardExit, ForwardSource, Owner, Peer, Places, ProxyConfig, Timings, is_plain_name,
};
use vmferry_transport::Address;

use self::admission::{AnyHost, NoPolicy};
use super::agent::mover::{Admitted, FleetAdmission};
use super::receivers::template::TemplateTable;
use crate::args::{parse_duration, parse_rate};
use crate::commands::fleet::config::{FleetTable, HostTable};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// The usual limit of `max_receivers`: a QEMU that waits for a guest takes little memory.
const DEFAULT_MAX_RECEIVERS: u16 = 16;

/// The file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    listen: String,
    tls: Option<PathBuf>,
    policy: Option<PathBuf>,
    #[serde(default = "default_directory")]
    directory: PathBuf,
    #[serde(default = "default_libvirt")]
    libvirt_socket: PathBuf,
    qemu_user: Option<String>,
    reconnect_timeout: Option<String>,
    max_bandwidth: Option<String>,
    compress: Option<String>,
    #[serde(default)]
    plain: bool,
    #[serde(default, rename = "peer")]
    peers: Vec<PeerTable>,
    #[serde(default, rename = "forward")]
    forwards: Vec<ForwardTable>,
    #[serde(default, rename = "receive")]
    templates: Vec<TemplateTable>,
    max_receivers: Option<u16>,
    fleet: Option<FleetTable>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerTable {
    name: String,
    address: String,
    id: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ForwardTable {
    name: String,
    listen: Option<PathBuf>,
    peer: Option<String>,
    connect: Option<PathBuf>,
    from: Option<Vec<String>>,
}

fn default_directory() -> PathBuf {
    "/run/vmferry-peers".into()
}

fn default_libvirt() -> PathBuf {
    "/run/libvirt/libvirt-sock".into()
}

fn wrong(text: impl Into<String>) -> Failure {
    Failure::new(Code::Usage, text.into())
}

/// Reads a configuration, or a part of it.
pub fn read_toml<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let name = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| wrong(format!("the configuration {name} can't be read: {error}")))?;
    let parsed: Result<T, toml::de::Error> = toml::from_str(&text);
    parsed.map_err(|error| {
        let before = &text[..error.span().map_or(0, |span| span.start).min(text.len())];
        let line = before.matches('\n').count() + 1;
        let problem = error.message();
        wrong(format!("the configuration {name} is wrong at line {line}: {problem}"))
    })
}

impl Configuration {
    /// Reads the file and checks what can be checked without using it.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        read_toml(path)
    }

    /// Whether this host is in a fleet.
    pub fn has_fleet(&self) -> bool {
        self.fleet.is_some()
    }

    /// Its table, and what that says of this host.
    pub fn fleet(&self) -> Result<(&FleetTable, HostTable), Failure> {
        let table = self.fleet.as_ref().ok_or_else(|| wrong("there is no table [fleet]"))?;
        Ok((table, table.host(&self.listen)?))
    }

    /// Number of peers.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    /// Number of forwarding rules.
    pub fn forwards(&self) -> usize {
        self.forwards.len()
    }

    /// The names of the templates.
    pub fn template_names(&self) -> Vec<String> {
        self.templates.iter().map(|template| template.name.clone()).collect()
    }

    /// The template of this name.
    pub fn template(&self, name: &str) -> Option<&TemplateTable> {
        self.templates.iter().find(|template| template.name == name)
    }

    /// The most guests that may be arriving by templates at the same time.
    pub fn max_receivers(&self) -> usize {
        self.max_receivers.unwrap_or(DEFAULT_MAX_RECEIVERS).into()
    }

    /// The options of a sender's or receiver's certificates.
    pub fn link_options(&self) -> Result<Vec<OsString>, Failure> {
        let mut options = Vec::new();
        match &self.tls {
            Some(directory) => {
                options.extend(["--tls".into(), std::path::absolute(directory)?.into()])
            }
            None => options.push("--plain".into()),
        }
        Ok(options)
    }

    /// The options of a receiver's certificates and policy. In a fleet, the daemon admits guests:
    /// receivers expect one guest of one source.
    pub fn receiver_options(&self) -> Result<Vec<OsString>, Failure> {
        let mut options = self.link_options()?;
        if self.has_fleet() {
            return Ok(options);
        }
        if let Some(policy) = &self.policy {
            options.extend(["--policy".into(), std::path::absolute(policy)?.into()]);
        }
        Ok(options)
    }

    fn check_templates(&self) -> Result<(), Failure> {
        for template in &self.templates {
            template.check()?;
            let name = &template.name;
            if self.templates.iter().filter(|other| other.name == *name).count() > 1 {
                return Err(wrong(format!("two templates have the name {name}")));
            }
        }
        Ok(())
    }

    /// Where the sockets are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The certificates, if links have TLS.
    pub fn tls(&self) -> Option<TlsFiles> {
        self.tls.as_deref().map(TlsFiles::in_directory)
    }

    /// The policy.
    pub fn policy(&self) -> Option<&Path> {
        self.policy.as_deref()
    }

    /// How streams are packed.
    pub fn compression(&self) -> &str {
        self.compress.as_deref().unwrap_or("auto")
    }

    /// Whether links have no TLS.
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// Where the daemon of a peer listens.
    pub fn address_of(&self, peer: &str) -> Option<&str> {
        let named = self.peers.iter().find(|one| one.name == peer);
        named.map(|one| one.address.as_str())
    }

    /// Checks that a running daemon can use another configuration.
    pub fn check_change(&self, other: &Self) -> Result<(), Failure> {
        let same = |name, same: bool| (!same).then_some(name);
        let changed = same("listen", self.listen == other.listen)
            .or(same("tls", self.tls == other.tls))
            .or(same("plain", self.plain == other.plain))
            .or(same("directory", self.directory == other.directory))
            .or(same("[fleet]", self.fleet == other.fleet));
        match changed {
            Some(what) => {
                Err(wrong(format!("{what} can't change while the daemon runs: start it again")))
            }
            None => Ok(()),
        }
    }

    /// The user and the group that QEMU runs as, by `/etc/passwd`.
    pub fn qemu_owner(&self) -> Result<Owner, Failure> {
        owner::qemu_user(self.qemu_user.as_deref())
    }

    /// The sockets of this host that the daemon may make and reach.
    pub fn places(&self) -> Result<Places, Failure> {
        let mut places = Places {
            directory: self.directory.clone(),
            libvirt: self.libvirt_socket.clone(),
            qemu: self.qemu_owner()?,
            ..Places::default()
        };
        for peer in &self.peers {
            places.peers.push(self.peer(peer)?.name);
        }
        for rule in &self.forwards {
            let Forward { name, listen, connect } = self.rule(rule)?;
            places.entrances.extend(listen.map(|(path, _)| (name.clone(), path)));
            places.exits.extend(connect.map(|exit| (name, exit.path)));
        }
        Ok(places)
    }

    /// Whether this is the address of a peer.
    pub fn has_address(&self, address: &Address) -> bool {
        self.peers.iter().any(|peer| self.address(&peer.address).is_ok_and(|its| its == *address))
    }

    /// The proxy's configuration, without what the processes beside the daemon do. Reads
    /// certificates and policy.
    pub fn proxy(
        &self,
        output: &Output,
        qemu: Owner,
        admitted: &Arc<Admitted>,
    ) -> Result<ProxyConfig, Failure> {
        let tls = match &self.tls {
            Some(directory) => {
                let identity = TlsFiles::in_directory(directory).identity()?;
                let output = output.clone();
                identity.on_change(move |said| {
                    let event = json!({ "event": "certificates", "message": said });
                    output.event(&event, || said.to_owned());
                });
                Some(Arc::new(identity))
            }
            None if self.plain => None,
            None => {
                return Err(wrong(
                    "the configuration names no certificates: add `tls = \"DIR\"` with a \
                     directory made by `vmferry pki`, or `plain = true` if the network is private \
                     to these hosts",
                ));
            }
        };
        self.check_templates()?;
        self.fleet.as_ref().map_or(Ok(()), |fleet| fleet.check(&self.listen))?;
        let duration = |text: &Option<String>, default| match text {
            Some(text) => parse_duration(text).map_err(wrong),
            None => Ok(default),
        };
        let defaults = Timings::default();
        let reconnect = duration(&self.reconnect_timeout, defaults.reconnect)?;
        let way = match &self.compress {
            Some(text) => {
                text.parse::<CompressionWay>().map_err(|error| wrong(error.to_string()))?
            }
            None => CompressionWay::Auto,
        };
        let bandwidth = self.max_bandwidth.as_deref().map(parse_rate).transpose().map_err(wrong)?;
        Ok(ProxyConfig {
            listen: self.address(&self.listen)?,
            tls,
            policy: Some(self.admission(output, admitted)?),
            peers: self.peers.iter().map(|peer| self.peer(peer)).collect::<Result<_, _>>()?,
            forwards: self.forwards.iter().map(|rule| self.rule(rule)).collect::<Result<_, _>>()?,
            directory: self.directory.clone(),
            libvirt: self.libvirt_socket.clone(),
            qemu,
            journals: PathBuf::new(),
            domains: None,
            definition_facts: None,
            keeper: None,
            access: None,
            receivers: None,
            timings: Timings { reconnect, ..defaults },
            compression: CompressionConfig { way, ..CompressionConfig::default() },
            bandwidth,
        })
    }

    fn address(&self, text: &str) -> Result<Address, Failure> {
        let scheme = if self.plain { "tcp" } else { "tls" };
        format!("{scheme}:{text}").parse().map_err(|error| Failure::of(Code::Usage, error))
    }

    fn peer(&self, table: &PeerTable) -> Result<Peer, Failure> {
        let PeerTable { name, address, id } = table.clone();
        if !is_plain_name(&name) {
            return Err(wrong(format!(
                "{name:?} can't be a peer's name, because a directory is named after it: use up to \
                 64 letters, digits, `-`, `_` and `.`"
            )));
        }
        Ok(Peer { address: self.address(&address)?, name, id })
    }

    fn rule(&self, table: &ForwardTable) -> Result<Forward, Failure> {
        let ForwardTable { name, listen, peer, connect, from } = table.clone();
        if self.forwards.iter().filter(|rule| rule.name == name).count() > 1 {
            return Err(wrong(format!("two rules have the name {name}")));
        }
        let listen = match (listen, peer) {
            (Some(path), Some(peer)) if self.peers.iter().any(|one| one.name == peer) => {
                Some((path, peer))
            }
            (Some(_), Some(peer)) => {
                return Err(wrong(format!("rule {name} names the unknown peer {peer}")));
            }
            (None, None) => None,
            _ => {
                return Err(wrong(format!(
                    "rule {name} needs both `listen` and `peer`, or neither of them"
                )));
            }
        };
        if listen.is_none() && connect.is_none() {
            return Err(wrong(format!(
                "rule {name} does nothing: give `listen` and `peer`, or `connect`"
            )));
        }
        let connect = match (connect, from) {
            (Some(path), Some(from)) if !from.is_empty() => {
                let from = from.iter().map(|host| self.source(&name, host));
                Some(ForwardExit { path, from: from.collect::<Result<_, _>>()? })
            }
            (Some(_), _) => {
                return Err(wrong(format!(
                    "rule {name} does not say which hosts may use its `connect`: add \
                     `from = [\"HOST\"]` with names of peers or URIs of certificates"
                )));
            }
            (None, Some(_)) => {
                return Err(wrong(format!("rule {name} has `from` and no `connect`")));
            }
            (None, None) => None,
        };
        Ok(Forward { name, listen, connect })
    }

    /// A host in `from` of a rule.
    fn source(&self, rule: &str, host: &str) -> Result<ForwardSource, Failure> {
        if host == "*" {
            return Ok(ForwardSource::Any);
        }
        if host.contains("://") {
            return Ok(ForwardSource::Named(host.to_owned()));
        }
        let peer = self.peers.iter().find(|peer| peer.name == host);
        let peer = peer.ok_or_else(|| {
            wrong(format!(
                "`from` of rule {rule} names the unknown peer {host}: use the `name` of a peer, \
                 the URI of a certificate such as spiffe://vmferry/host/host-a, or \"*\""
            ))
        })?;
        let name = match (&peer.id, self.address(&peer.address)?) {
            (Some(id), _) => id.clone(),
            (None, Address::Tls { host, .. } | Address::Tcp { host, .. }) => host,
            (None, address) => address.to_string(),
        };
        Ok(ForwardSource::Named(name))
    }

    fn admission(
        &self,
        output: &Output,
        admitted: &Arc<Admitted>,
    ) -> Result<Arc<dyn Admission>, Failure> {
        let policy = self.own_admission(output)?;
        if !self.has_fleet() {
            return Ok(policy);
        }
        Ok(Arc::new(FleetAdmission { admitted: Arc::clone(admitted), policy }))
    }

    fn own_admission(&self, output: &Output) -> Result<Arc<dyn Admission>, Failure> {
        let path = match &self.policy {
            Some(path) => path,
            // Hosts have no names there that a policy could tell apart.
            None if self.plain => return Ok(Arc::new(AnyHost)),
            None => return Ok(Arc::new(NoPolicy)),
        };
        let policy = Policy::load(path).map_err(|error| Failure::of(Code::Usage, error))?;
        let output = output.clone();
        policy.tell(move |said| {
            output.event(&json!({ "event": "policy", "message": said }), || said.to_owned());
        });
        Ok(Arc::new(policy))
    }
}
