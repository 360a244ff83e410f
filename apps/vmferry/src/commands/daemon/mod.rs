//! `vmferry daemon`: carries the migrations of this host's libvirt, and other connections, to other
//! hosts and from them.

pub mod config;
pub mod domains;
pub mod keeper;
pub mod receivers;
mod report;
mod served;
pub mod streams;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::json;
use vmferry_control::Directories;
use vmferry_proxy::{Proxy, ProxyEvent, Receivers};
use vmferry_transport::FileVersion;

use super::prepared_directories;
use crate::args::DaemonOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use config::Configuration;
use receivers::ReceiverStarter;
use report::DaemonHost;
use served::Guests;
use streams::Streams;

/// The libvirt that receives guests, as its clients on this host name it.
const LIBVIRT: &str = "qemu:///system";

/// How often the configuration file is checked for changes.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Runs until a signal.
pub fn run(options: &DaemonOptions, output: &Output) -> Result<(), Failure> {
    // Taken before the file is read, so that a change in between is noticed.
    let mut seen = FileVersion::of(&options.config);
    let mut current = Configuration::read(&options.config)?;
    let proxy = current.proxy(output)?;
    if options.check {
        let checked =
            json!({ "ok": true, "peers": current.peers(), "forwards": current.forwards() });
        output.result(&checked, || {
            let (peers, forwards) = (current.peers(), current.forwards());
            format!("{} is right: {peers} peers, {forwards} rules", options.config.display())
        });
        return Ok(());
    }
    let directories = prepared_directories()?;
    let mut proxy = proxy;
    proxy.journals = directories.journals();
    // Without the ending of guests' control sockets.
    let keeper = keeper::KeeperAt::new(keeper_socket(&directories));
    proxy.keeper = Some(Arc::new(keeper));
    let receivers: Arc<dyn Receivers> =
        Arc::new(ReceiverStarter::spawn(&options.config, directories.runtime(), output)?);
    proxy.receivers = Some(Arc::clone(&receivers));
    let guests = Arc::new(Guests::new(directories));
    let streams = Arc::new(Streams::default());
    let (told, of_guests, of_streams) = (output.clone(), Arc::clone(&guests), Arc::clone(&streams));
    let observer = move |event: ProxyEvent| {
        of_guests.hear(&event);
        of_streams.hear(&event);
        told.event(&event, || event.to_string());
    };
    let proxy = Proxy::start(proxy, Box::new(observer)).map_err(|error| {
        let code = match &error {
            vmferry_proxy::ProxyError::Listen(_) => Code::Busy,
            _ => Code::Internal,
        };
        Failure::of(code, error)
    })?;
    let proxy = Arc::new(proxy);
    guests.serve(&proxy);
    proxy.report(Arc::new(DaemonHost::new(LIBVIRT)));
    let served = streams.serve(current.directory(), &proxy);
    let _server = served.map_err(|error| Failure::of(Code::Busy, error))?;
    let (end, ended) = channel();
    crate::signals::on_end(move || {
        let _ = end.send(());
    })?;
    let address = proxy.address().to_string();
    let listening = json!({
        "event": "listening", "address": address, "pid": std::process::id(),
        "peers": current.peers(),
    });
    output.event(&listening, || {
        format!(
            "listening on {address}; sockets of {} peers are in {}",
            current.peers(),
            current.directory().display()
        )
    });
    loop {
        match ended.recv_timeout(CHECK_PERIOD) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        let now = FileVersion::of(&options.config);
        if now == seen {
            continue;
        }
        seen = now;
        match reload(options, &current, (&proxy, &receivers), output) {
            Ok(fresh) => {
                current = fresh;
                remark(output, "the configuration has changed, and the new one is in use");
            }
            Err(failure) => {
                let text = format!("the configuration has changed and is not usable: {failure}");
                remark(output, &text);
            }
        }
    }
}

/// Where the keeper of this user's daemon listens.
pub fn keeper_socket(directories: &Directories) -> PathBuf {
    directories.runtime().join("keeper")
}

fn reload(
    options: &DaemonOptions,
    current: &Configuration,
    (proxy, receivers): (&Proxy, &Arc<dyn Receivers>),
    output: &Output,
) -> Result<Configuration, Failure> {
    let fresh = Configuration::read(&options.config)?;
    if let Some(what) = current.needs_restart(&fresh) {
        let text = format!("{what} can't change while the daemon runs: start it again");
        return Err(Failure::new(Code::Usage, text));
    }
    let mut config = fresh.proxy(output)?;
    config.journals = prepared_directories()?.journals();
    config.receivers = Some(Arc::clone(receivers));
    let configured = proxy.reconfigure(config);
    configured.map_err(|error| Failure::of(Code::Usage, error))?;
    Ok(fresh)
}

fn remark(output: &Output, said: &str) {
    output.event(&json!({ "event": "configuration", "message": said }), || said.to_owned());
}
