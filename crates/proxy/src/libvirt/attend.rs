//! What the daemon looks after once a second: its keeper, and journals that could not be written.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::arrivals::Unwritten;
use crate::event::ProxyEvent;
use crate::proxy::Shared;

/// How often.
const PERIOD: Duration = Duration::from_secs(1);

/// Starts the thread, which ends soon after the proxy.
///
/// # Errors
/// The system's.
pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<()> {
    let shared = Arc::downgrade(shared);
    let thread = std::thread::Builder::new().name("attend".into());
    thread.spawn(move || run(&shared)).map(drop)
}

fn run(shared: &Weak<Shared>) {
    let (mut restarts, mut is_told) = (0, false);
    loop {
        std::thread::sleep(PERIOD);
        let Some(shared) = shared.upgrade() else { return };
        if shared.is_ending() {
            return;
        }
        for Unwritten { session, guest, error } in shared.migrations.arrivals.retry() {
            let (session, reason) = (session.to_string(), vmferry::chain(&error));
            shared.tell(ProxyEvent::Unjournaled { session, guest, reason });
        }
        let Some(keeper) = &shared.keeper else { continue };
        let checked = keeper.check();
        if keeper.restarts() > restarts {
            restarts = keeper.restarts();
            shared.tell(ProxyEvent::KeeperRestarted { connections: keeper.connections() });
        }
        match checked {
            Ok(()) => is_told = false,
            Err(error) if !std::mem::replace(&mut is_told, true) => {
                shared.tell(ProxyEvent::KeeperFailed { reason: error.to_string() });
            }
            Err(_) => {}
        }
    }
}
