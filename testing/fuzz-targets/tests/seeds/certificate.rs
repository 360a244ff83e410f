//! Runs the seeds of the fuzz target of certificates.

use vmferry_fuzz_targets::certificate;

use rcgen::{CertificateParams, KeyPair, SanType};
use vmferry_transport::pki::{self, IssueRequest, Validity};

// The generated keys differ each time.
seed_tests!(certificate, places: 400, differs: |_| true);

fn seeds() -> Vec<(String, Vec<u8>)> {
    let uri = |text: &str| SanType::URI(text.try_into().unwrap());
    let dns = |text: &str| SanType::DnsName(text.try_into().unwrap());
    let address = |text: &str| SanType::IpAddress(text.parse().unwrap());
    let mut seeds = Vec::new();
    for (name, names) in [
        ("uri", vec![uri("spiffe://vmferry/host/a")]),
        ("all-kinds", vec![dns("a.example.org"), address("10.0.0.7"), uri("urn:uuid:7")]),
        ("ipv6", vec![address("2001:db8::7"), uri("2001:db8::8"), dns("10.0.0.8")]),
        ("slashes", vec![dns("spiffe://vmferry/host/a"), uri("a:b"), uri("https://[::1]/")]),
        ("none", Vec::new()),
    ] {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names;
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        seeds.push((format!("{name}-der"), [&[0], &made.der()[..]].concat()));
        seeds.push((format!("{name}-pem"), [&[1], made.pem().as_bytes()].concat()));
    }
    let directory = tempfile::tempdir().unwrap();
    let (authority, host) = (directory.path().join("pki"), directory.path().join("tls"));
    let validity = Validity::days(30);
    pki::init(&authority, "vmferry", validity).unwrap();
    pki::issue(&authority, &host, &IssueRequest::new("host-a", validity)).unwrap();
    let list = pki::revoke(&authority, &["host-a".to_owned()], validity).unwrap();
    seeds.push(("list".into(), [&[2], &std::fs::read(list.path).unwrap()[..]].concat()));
    let chain = std::fs::read(host.join("host.pem")).unwrap();
    seeds.push(("chain".into(), [&[1], &chain[..], &chain].concat()));
    seeds
}
