//! Whom a daemon without a policy admits.

use vmferry::config::policy::Admission;
use vmferry_transport::PeerIdentity;
use vmferry_wire::GuestIdentity;

/// Without a policy no host may send anything here.
#[derive(Debug)]
pub struct NoPolicy;

const NO_POLICY: &str = "this host's daemon has no policy, so it receives nothing";

impl Admission for NoPolicy {
    fn check_source(&self, _: &PeerIdentity) -> Result<(), String> {
        Err(NO_POLICY.into())
    }

    fn check_guest(&self, _: &PeerIdentity, _: &GuestIdentity) -> Result<(), String> {
        Err(NO_POLICY.into())
    }
}

/// On a private network without certificates, every host may send any guest.
#[derive(Debug)]
pub struct AnyHost;

impl Admission for AnyHost {
    fn check_source(&self, _: &PeerIdentity) -> Result<(), String> {
        Ok(())
    }

    fn check_guest(&self, _: &PeerIdentity, _: &GuestIdentity) -> Result<(), String> {
        Ok(())
    }
}
