//! Probes of other hosts.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use vmferry::config::policy::Admission;
use vmferry::probe::{About, HostFacts, LibvirtFacts, ProbeError, Probed, probe};
use vmferry_proxy::{HostReport, ProxyEvent};
use vmferry_transport::{Dialer, PeerIdentity};
use vmferry_wire::GuestIdentity;

use crate::support::Hosts;

/// Reports one release of libvirt, when it may.
#[derive(Debug)]
struct Report {
    begun: Sender<()>,
    may_end: Mutex<Receiver<()>>,
}

impl HostReport for Report {
    fn facts(&self) -> HostFacts {
        self.begun.send(()).unwrap();
        // An error means that it may end at once from now on.
        let _ = self.may_end.lock().recv();
        let libvirt = LibvirtFacts { libvirt: Some("11.3.0".into()), ..LibvirtFacts::default() };
        HostFacts { libvirt: Some(libvirt), ..HostFacts::default() }
    }
}

fn ask(dialer: &Dialer, guest: &str) -> Result<Probed, ProbeError> {
    let guest = GuestIdentity { uuid: uuid::Uuid::nil(), name: guest.into() };
    probe(dialer, About::Guest(&guest), Duration::ZERO, &mut |_, _| {})
}

#[test]
fn report_is_made_for_one_host_at_a_time() {
    let hosts = Hosts::start();
    let b = hosts.b.as_ref().unwrap();
    let dialer = Dialer::new(b.address().clone(), None);
    let early = ask(&dialer, "web").unwrap();
    assert_eq!((early.refusal, early.host.libvirt), (None, None), "no report yet");
    let ((begun, has_begun), (end, may_end)) = (channel(), channel());
    b.report(Arc::new(Report { begun, may_end: Mutex::new(may_end) }));
    let first = std::thread::spawn({
        let dialer = dialer.clone();
        move || ask(&dialer, "web").unwrap()
    });
    has_begun.recv().unwrap();
    let second = ask(&dialer, "web").unwrap_err();
    assert!(matches!(second, ProbeError::Busy), "{second}");
    drop(end);
    let probed = first.join().unwrap();
    let libvirt = probed.host.libvirt.unwrap();
    assert_eq!((libvirt.libvirt.as_deref(), probed.refusal), (Some("11.3.0"), None));
    assert_eq!(libvirt.qemu_user, Some(rustix::process::geteuid().as_raw()));
    assert_eq!(libvirt.directory, Some(hosts.directory.path().join("b")));
}

#[test]
fn host_may_ask_again_as_soon_as_it_has_its_answer() {
    for rule in [Rule::Guest("web"), Rule::Nobody] {
        let rule: Arc<dyn Admission> = Arc::new(rule);
        let hosts = Hosts::with(|config| config.policy = Some(Arc::clone(&rule)));
        let dialer = Dialer::new(hosts.b.as_ref().unwrap().address().clone(), None);
        for _ in 0..100 {
            ask(&dialer, "web").unwrap();
        }
    }
}

/// Admits one guest of one host, or no host.
#[derive(Debug)]
enum Rule {
    Guest(&'static str),
    Nobody,
}

impl Admission for Rule {
    fn check_source(&self, _: &PeerIdentity) -> Result<(), String> {
        match self {
            Self::Guest(_) => Ok(()),
            Self::Nobody => Err("no rule is for this host".into()),
        }
    }

    fn check_guest(&self, _: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
        match self {
            Self::Guest(name) if guest.name == *name => Ok(()),
            _ => Err("no rule is for this guest".into()),
        }
    }
}

#[test]
fn host_that_may_send_nothing_is_told_nothing_else() {
    for (rule, refusals) in [
        (Rule::Guest("web"), [None, Some("no rule is for this guest")]),
        (Rule::Nobody, [Some("no rule is for this host"); 2]),
    ] {
        let is_open = matches!(rule, Rule::Guest(_));
        let rule: Arc<dyn Admission> = Arc::new(rule);
        let hosts = Hosts::with(|config| config.policy = Some(Arc::clone(&rule)));
        let b = hosts.b.as_ref().unwrap();
        let ((begun, _begun), (_, may_end)) = (channel(), channel());
        b.report(Arc::new(Report { begun, may_end: Mutex::new(may_end) }));
        let dialer = Dialer::new(b.address().clone(), None);
        for (guest, refusal) in ["web", "db"].into_iter().zip(refusals) {
            let probed = ask(&dialer, guest).unwrap();
            assert_eq!(probed.refusal.as_deref(), refusal);
            assert_eq!(probed.host.libvirt.is_some(), is_open);
        }
        if !is_open {
            let refused = |event: &ProxyEvent| match event {
                ProxyEvent::Refused { wanted, .. } => wanted == "ask about this host",
                _ => false,
            };
            hosts.events.wait_for('b', refused);
        }
    }
}
