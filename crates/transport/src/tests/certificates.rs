//! Validity dates and clocks, revocation, reloading without a restart, and the identity of peers.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{Pki, join, listen, pair};
use crate::pki::{self, IssueRequest, Validity};
use crate::{Dialer, IdentityFiles, Listener, TlsIdentity, TransportError};

impl Pki {
    fn authority(&self) -> PathBuf {
        self.directory.path().join("ca")
    }

    /// Issues an identity. Its files may be replaced later.
    fn files(&self, name: &str, validity: Validity) -> IdentityFiles {
        let out = self.directory.path().join(name);
        let mut request = IssueRequest::new(name, validity);
        request.addresses = vec!["127.0.0.1".into()];
        pki::issue(&self.authority(), &out, &request).unwrap();
        IdentityFiles::in_directory(&out)
    }

    fn revoke(&self, hosts: &[&str], validity: Validity) -> PathBuf {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        pki::revoke(&self.authority(), &hosts, validity).unwrap().path
    }
}

fn identity(files: IdentityFiles) -> Arc<TlsIdentity> {
    Arc::new(TlsIdentity::new(files).unwrap())
}

fn copy(from: &Path, to: &Path) {
    // Atomically, as administrators should: readers see the old or the new file.
    let fresh = to.with_extension("fresh");
    std::fs::copy(from, &fresh).unwrap();
    std::fs::rename(fresh, to).unwrap();
}

fn dialer(listener: &Listener, identity: &Arc<TlsIdentity>) -> Dialer {
    Dialer::new(listener.local_address().clone(), Some(Arc::clone(identity)))
}

#[test]
fn key_exchange_is_post_quantum_and_both_sides_report_it() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    let (accepted, dialed) = pair(&listener, &dialer(&listener, &pki.local("b")));
    for channel in [&accepted, &dialed] {
        assert_eq!(channel.peer().key_exchange.as_deref(), Some("X25519MLKEM768"));
    }
    let reports = accepted.peer().to_string();
    assert!(reports.ends_with("(spiffe://vmferry/host/b)"), "{reports}");
}

#[test]
fn clock_skew_is_tolerated_up_to_the_limit() {
    let pki = Pki::new();
    let listener = listen("tls:127.0.0.1:0", Some(pki.local("a")));
    // Expired a day ago, and valid in a day.
    for (name, validity, word) in [
        ("late", Validity { from_days: -9, until_days: -1 }, "24 h ago by this host's clock"),
        ("early", Validity { from_days: 1, until_days: 9 }, "from now by this host's clock"),
    ] {
        let files = pki.files(name, validity);
        let (accepted, _) = join(&listener, &dialer(&listener, &identity(files.clone())));
        let error = accepted.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");

        let mut patient = pki.files(&format!("{name}-friend"), Validity::days(1));
        patient.clock_skew = Duration::from_secs(2 * 86_400);
        let listener = listen("tls:127.0.0.1:0", Some(identity(patient)));
        pair(&listener, &dialer(&listener, &identity(files)));
    }
}

#[test]
fn revoked_certificate_is_refused_by_both_sides_and_lists_must_be_valid() {
    let pki = Pki::new();
    let good = pki.files("good", Validity::days(1));
    let bad = identity(pki.files("bad", Validity::days(1)));
    let mut strict = good.clone();
    strict.revocations = vec![pki.revoke(&["bad"], Validity { from_days: -1, until_days: 30 })];
    let strict = identity(strict);

    let listener = listen("tls:127.0.0.1:0", Some(Arc::clone(&strict)));
    let (accepted, dialed) = join(&listener, &dialer(&listener, &bad));
    let (accepted, dialed) = (accepted.unwrap_err(), dialed.unwrap_err());
    assert!(matches!(accepted, TransportError::Revoked { .. }), "{accepted:?}");
    assert!(dialed.to_string().contains("it was revoked"), "{dialed}");
    pair(&listener, &dialer(&listener, &pki.local("other")));

    let server = listen("tls:127.0.0.1:0", Some(bad));
    let (_, dialed) = join(&server, &dialer(&server, &strict));
    assert!(matches!(dialed.unwrap_err(), TransportError::Revoked { .. }));

    // An outdated list rejects its own authority's certificates, but not those of other
    // authorities.
    let mut stale = good;
    stale.revocations = vec![pki.revoke(&[], Validity { from_days: -9, until_days: -2 })];
    let listener = listen("tls:127.0.0.1:0", Some(identity(stale.clone())));
    let (accepted, dialed) = join(&listener, &dialer(&listener, &pki.local("third")));
    let error = accepted.unwrap_err();
    assert!(error.to_string().contains("has been out of date since 20"), "{error}");
    assert!(error.to_string().contains("vmferry pki revoke"), "{error}");
    assert!(error.is_authentication() && dialed.unwrap_err().is_authentication());

    let other = Pki::new();
    let theirs = other.files("theirs", Validity::days(1));
    let both = pki.directory.path().join("both.pem");
    let authorities = [&stale.ca, &theirs.ca].map(|path| std::fs::read_to_string(path).unwrap());
    std::fs::write(&both, authorities.concat()).unwrap();
    let (mut ours, mut theirs) = (stale, theirs);
    (ours.ca, theirs.ca) = (both.clone(), both);
    let listener = listen("tls:127.0.0.1:0", Some(identity(ours)));
    pair(&listener, &dialer(&listener, &identity(theirs)));
}

#[test]
fn newest_revocation_list_counts_and_renewal_keeps_revocations() {
    let pki = Pki::new();
    let mut files = pki.files("good", Validity::days(1));
    let bad = identity(pki.files("bad", Validity::days(1)));
    let month = Validity { from_days: -1, until_days: 30 };
    let first = pki.revoke(&[], Validity { from_days: -2, until_days: 30 });
    let old = pki.directory.path().join("old.pem");
    copy(&first, &old);
    let by_file = pki.directory.path().join("bad/host.pem").display().to_string();
    let list = pki::revoke(&pki.authority(), &[by_file], month).unwrap();
    assert_eq!((list.number, list.added, list.revoked), (2, 1, 1));
    let list = pki::revoke(&pki.authority(), &["bad".into()], month).unwrap();
    assert_eq!((list.number, list.added, list.revoked), (3, 0, 1), "it is known already");
    files.revocations = vec![old, list.path];
    let listener = listen("tls:127.0.0.1:0", Some(identity(files)));
    let (accepted, _) = join(&listener, &dialer(&listener, &bad));
    assert!(matches!(accepted.unwrap_err(), TransportError::Revoked { .. }));

    let unknown = pki::revoke(&pki.authority(), &["nobody".into()], month).unwrap_err();
    assert!(unknown.to_string().contains("issued to `nobody`"), "{unknown}");
    let other = Pki::new();
    other.local("x");
    let strange = other.directory.path().join("x/host.pem").display().to_string();
    let error = pki::revoke(&pki.authority(), &[strange], month).unwrap_err();
    assert!(error.to_string().contains("was not issued by this authority"), "{error}");
}

#[test]
fn renewed_files_apply_to_the_next_channel_and_broken_ones_do_not() {
    let pki = Pki::new();
    let expired = Validity { from_days: -9, until_days: -2 };
    let files = pki.files("a", expired);
    let fresh = pki.files("a-renewed", Validity::days(1));
    let server = identity(files.clone());
    let reports = Arc::new(Mutex::new(Vec::new()));
    let collector = Arc::clone(&reports);
    server.on_change(move |text| collector.lock().unwrap().push(text.to_owned()));
    let listener = listen("tls:127.0.0.1:0", Some(server));
    let client = pki.local("b");
    let refused = || {
        let (_, dialed) = join(&listener, &dialer(&listener, &client));
        assert!(matches!(dialed.unwrap_err(), TransportError::Expired { .. }));
    };
    refused();
    assert!(reports.lock().unwrap().is_empty());

    // Half of the renewal: the old set stays in use, and the problem is reported once.
    copy(&fresh.certificate, &files.certificate);
    refused();
    refused();
    let words = std::mem::take(&mut *reports.lock().unwrap());
    assert_eq!(words.len(), 1, "{words:?}");
    assert!(words[0].contains("does not fit the key"), "{words:?}");

    copy(&fresh.key, &files.key);
    pair(&listener, &dialer(&listener, &client));
    let words = std::mem::take(&mut *reports.lock().unwrap());
    assert_eq!(words.len(), 1, "{words:?}");
    assert!(words[0].contains("use the new ones"), "{words:?}");

    // A new list is used at once, and must not disappear afterwards.
    let list = files.revocations_if_present.clone().unwrap();
    copy(&pki.revoke(&["b"], Validity { from_days: -1, until_days: 30 }), &list);
    let revoked = || {
        let (accepted, _) = join(&listener, &dialer(&listener, &client));
        assert!(matches!(accepted.unwrap_err(), TransportError::Revoked { .. }));
    };
    revoked();
    std::fs::remove_file(&list).unwrap();
    revoked();
    // A key that other users can read is not accepted either.
    std::fs::set_permissions(&files.key, std::fs::Permissions::from_mode(0o644)).unwrap();
    revoked();
    let words = std::mem::take(&mut *reports.lock().unwrap());
    assert!(words.iter().any(|line| line.contains("crl.pem: can't be read")), "{words:?}");
}

#[test]
fn key_from_a_pipe_is_read_once_and_never_blocks_later() {
    let pki = Pki::new();
    let files = pki.files("a", Validity::days(1));
    let key = std::fs::read(&files.key).unwrap();
    std::fs::remove_file(&files.key).unwrap();
    mknodat(CWD, &files.key, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let path = files.key.clone();
    let writer = std::thread::spawn(move || std::fs::write(path, key).unwrap());
    let server = identity(files.clone());
    writer.join().unwrap();
    let listener = listen("tls:127.0.0.1:0", Some(server));
    let client = pki.local("b");
    pair(&listener, &dialer(&listener, &client));
    copy(&pki.files("fresh", Validity::days(1)).certificate, &files.certificate);
    pair(&listener, &dialer(&listener, &client));
}

#[test]
fn destination_id_is_checked_instead_of_the_address() {
    let pki = Pki::new();
    let server = pki.host("far", &["192.0.2.1"], Validity::days(1));
    let listener = listen("tls:127.0.0.1:0", Some(server));
    let mut dialer = dialer(&listener, &pki.local("b"));
    dialer.destination_id = Some("spiffe://vmferry/host/far".into());
    pair(&listener, &dialer);

    dialer.destination_id = Some("spiffe://vmferry/host/fa".into());
    let (accepted, dialed) = join(&listener, &dialer);
    let error = dialed.unwrap_err();
    assert!(matches!(error, TransportError::IdentityMismatch { .. }), "{error:?}");
    assert!(error.to_string().contains("is for spiffe://vmferry/host/far, 192.0.2.1"), "{error}");
    assert!(accepted.unwrap_err().is_authentication());

    // A matching URI does not make an otherwise invalid certificate acceptable.
    let other = Pki::new();
    let stranger = listen("tls:127.0.0.1:0", Some(other.local("far")));
    dialer.address = stranger.local_address().clone();
    dialer.destination_id = Some("spiffe://vmferry/host/far".into());
    let (_, dialed) = join(&stranger, &dialer);
    assert!(matches!(dialed.unwrap_err(), TransportError::UnknownIssuer { .. }));

    // Without TLS, no peer has the expected URI.
    let plain = listen("tcp:127.0.0.1:0", None);
    dialer.address = plain.local_address().clone();
    let error = dialer.connect().unwrap_err();
    assert!(error.to_string().contains("without TLS"), "{error}");
}

#[test]
fn unix_peer_is_identified_by_its_user() {
    let directory = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", directory.path().join("s").display());
    let listener = listen(&address, None);
    let (accepted, dialed) = pair(&listener, &Dialer::new(address.parse().unwrap(), None));
    let own = rustix::process::getuid().as_raw();
    assert_eq!((accepted.peer().uid, dialed.peer().uid), (Some(own), Some(own)));
    assert_eq!(accepted.peer().name(), Some(format!("uid {own}")));
}

#[test]
fn debug_output_hides_the_key() {
    let pki = Pki::new();
    let files = pki.files("a", Validity::days(1));
    let key = std::fs::read_to_string(&files.key).unwrap();
    let shown = format!("{:?}", identity(files));
    assert!(key.lines().all(|line| !shown.contains(line)), "{shown}");
}
