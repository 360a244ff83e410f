//! The control sockets of guests that libvirt moves through this daemon, by any command: for
//! `vmferry status`, `cancel` and `resolve`.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use serde_json::{Value, json};
use vmferry_control::{
    Answer, ControlError, Directories, ErrorCode, Handler, Replies, Request, Server,
};
use vmferry_handover::OperatorWord;
use vmferry_proxy::{DoubtStatus, Phase, Proxy, ProxyEvent, Side};

use super::helper::Helper;

/// The sockets.
pub struct Guests {
    directories: Directories,
    helper: Arc<Helper>,
    proxy: Arc<OnceLock<Weak<Proxy>>>,
    servers: Mutex<HashMap<String, Server>>,
}

impl Guests {
    /// No sockets yet. They work once [`serve`](Self::serve) was called.
    pub fn new(directories: Directories, helper: Arc<Helper>) -> Self {
        Self { directories, helper, proxy: Arc::default(), servers: Mutex::default() }
    }

    /// Answers about the guests of this proxy.
    pub fn serve(&self, proxy: &Arc<Proxy>) {
        // It is called once.
        let _ = self.proxy.set(Arc::downgrade(proxy));
    }

    /// Makes or removes a guest's socket.
    pub fn hear(&self, event: &ProxyEvent) {
        match event {
            ProxyEvent::Prepared { guest, .. } | ProxyEvent::InDoubt { guest, .. } => {
                self.bind(guest);
            }
            ProxyEvent::Finished { guest, .. } => drop(self.servers.lock().remove(guest)),
            _ => {}
        }
    }

    fn bind(&self, guest: &str) {
        let mut servers = self.servers.lock();
        if servers.contains_key(guest) {
            return;
        }
        let about = || {
            let (guest, helper) = (guest.to_owned(), Arc::clone(&self.helper));
            Arc::new(MovedGuest { guest, helper, proxy: self.proxy.clone() })
        };
        // `vmferry send --libvirt` has the guest's name already.
        let names = [guest.to_owned(), format!("{guest}.daemon")];
        let bound = names
            .iter()
            .find_map(|name| Server::bind(&self.directories.socket(name), about()).ok());
        // The migration does not depend on it.
        if let Some(server) = bound {
            servers.insert(guest.to_owned(), server);
        }
    }
}

/// Answers for one guest.
struct MovedGuest {
    guest: String,
    helper: Arc<Helper>,
    proxy: Arc<OnceLock<Weak<Proxy>>>,
}

impl Handler for MovedGuest {
    fn handle(&self, request: Request, _replies: &Replies) -> Result<Answer, ControlError> {
        let proxy = self.proxy.get().and_then(Weak::upgrade);
        let proxy = proxy.ok_or_else(|| ControlError::new(ErrorCode::Busy, "the daemon starts"))?;
        match request {
            Request::Status => Ok(self.status(&proxy).into()),
            Request::Resolve { word } => self.resolve(&proxy, word),
            Request::Cancel => self.cancel(&proxy),
            _ => Err(ControlError::new(
                ErrorCode::WrongState,
                "libvirt moves this guest: use `virsh`",
            )),
        }
    }
}

impl MovedGuest {
    /// The guest's last session that is in doubt. An earlier one may have lost its libvirt.
    fn doubt(&self, proxy: &Proxy) -> Option<DoubtStatus> {
        proxy.doubts().into_iter().rfind(|doubt| doubt.guest == self.guest)
    }

    fn status(&self, proxy: &Proxy) -> Value {
        let migrations = proxy.migrations();
        let its = migrations.iter().rev().find(|migration| migration.guest == self.guest);
        let doubt = self.doubt(proxy);
        let uuid = its.map(|one| one.uuid).or(doubt.as_ref().map(|doubt| doubt.uuid));
        let peer =
            its.map(|one| one.peer.clone()).or(doubt.as_ref().map(|doubt| doubt.peer.clone()));
        let side = its.map_or(Side::Opener, |one| one.side);
        let way = match side {
            Side::Opener => "moving to",
            Side::Acceptor => "arriving from",
        };
        let phase = match its.map(|one| &one.phase) {
            Some(Phase::Preparing) => "preparing",
            Some(Phase::Copying) => "copying",
            Some(Phase::Finishing | Phase::Unanswered) | None => "finishing",
            Some(Phase::Moved) => "moved",
            Some(Phase::Failed(_)) => "failed",
        };
        json!({
            "name": self.guest,
            "uuid": uuid,
            "guest": "libvirt",
            "phase": format!("{way} {}", peer.unwrap_or_default()),
            "pid": std::process::id(),
            "migration": {
                "phase": phase,
                "in_doubt": doubt.is_some(),
                "session": doubt.map(|doubt| doubt.session),
            },
        })
    }

    fn resolve(&self, proxy: &Proxy, word: OperatorWord) -> Result<Answer, ControlError> {
        let doubt = self.doubt(proxy);
        match doubt {
            Some(doubt) if proxy.decide(doubt.session, word) => {
                Ok(json!({ "decided": word }).into())
            }
            _ => {
                let text = "this guest is not in doubt, so there is nothing to decide";
                Err(ControlError::new(ErrorCode::WrongState, text))
            }
        }
    }

    fn cancel(&self, proxy: &Proxy) -> Result<Answer, ControlError> {
        let migrations = proxy.migrations();
        let its = migrations.iter().rev().find(|migration| migration.guest == self.guest);
        let refused = |text: String| Err(ControlError::new(ErrorCode::WrongState, text));
        let Some(its) = its.filter(|its| its.side == Side::Opener) else {
            return refused("the migration is canceled at the source".into());
        };
        match self.helper.abort_job(its.uuid) {
            Ok(()) => Ok(json!({ "cancelling": true }).into()),
            Err(error) => refused(vmferry::chain(&error)),
        }
    }
}
