//! A QEMU that waits for a guest, as the engine's destination.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;
use uuid::Uuid;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_wire::GuestIdentity;

use crate::error::QemuError;
use crate::machine::{self, Machine};
use crate::qmp::Qmp;
use crate::ram::{Block, Carrier, Ram};
use crate::settings::Settings;
use crate::source::{self, VMM, host};
use crate::state;

/// A QEMU that was started with `-incoming defer`.
pub struct QemuDestination {
    qmp: Qmp,
    ram: Ram,
    machine: Machine,
    settings: Settings,
    expected: Expected,
    /// A state was loaded, or tried to be: this QEMU can take no other guest.
    used: bool,
}

/// The guest that is welcome; any, by default.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Its name.
    pub name: Option<String>,
    /// Its UUID. A QEMU that was started with `-uuid` takes no other guest than that one either.
    pub uuid: Option<Uuid>,
}

impl Expected {
    fn check(&self, guest: &GuestIdentity) -> Result<(), PrepareError> {
        let refused =
            |expected: String, offered: String| Err(PrepareError::Identity { expected, offered });
        match (&self.name, self.uuid) {
            (Some(name), _) if *name != guest.name => refused(name.clone(), guest.name.clone()),
            (_, Some(uuid)) if uuid != guest.uuid => {
                refused(uuid.to_string(), guest.uuid.to_string())
            }
            _ => Ok(()),
        }
    }
}

/// What the source says of itself.
#[derive(Deserialize)]
struct Offered {
    host: String,
    machine: Machine,
    blocks: Vec<Block>,
}

impl QemuDestination {
    /// Attaches to the QEMU whose QMP socket this is.
    ///
    /// # Errors
    /// If it does not wait for a migration, or its memory is not of the kind that can be filled from
    /// outside.
    pub fn attach(socket: &Path, mut expected: Expected) -> Result<Self, QemuError> {
        let mut qmp = Qmp::connect(socket)?;
        let status = qmp.execute("query-status", json!({}))?;
        if status["status"] != "inmigrate" {
            return Err(QemuError::State {
                found: status["status"].as_str().unwrap_or_default().to_owned(),
                wanted: "waiting for a guest: start it with `-incoming defer`",
            });
        }
        // While QEMU waits, `stop` is what `-S` is: the guest stands still once its state is loaded,
        // until COMMIT.
        qmp.execute("stop", json!({}))?;
        let own = source::identity(&mut qmp)?.uuid;
        if expected.uuid.is_none() && !own.is_nil() {
            expected.uuid = Some(own);
        }
        let (machine, _) = machine::look(&mut qmp)?;
        let ram = Ram::find(&mut qmp)?;
        let settings = Settings::read(&mut qmp)?;
        Ok(Self { qmp, ram, machine, settings, expected, used: false })
    }

    /// The QMP socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.qmp.path()
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.qmp.pid()
    }

    /// Ends the QEMU.
    ///
    /// # Errors
    /// QMP's.
    pub fn quit(&mut self) -> Result<(), QemuError> {
        self.qmp.execute("quit", json!({}))?;
        Ok(())
    }

    /// Frees every page, so that nothing of an earlier guest or of the firmware is left.
    fn punch(&self) -> Result<(), QemuError> {
        self.ram.memory.punch().map_err(|error| QemuError::Local {
            action: "empty the memory files",
            source: std::io::Error::other(error),
        })
    }
}

impl DestinationVm for QemuDestination {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        if guest.vmm != VMM {
            let text = format!("the guest is one of `{}`, and this is a QEMU", guest.vmm);
            return Err(PrepareError::Incompatible(text));
        }
        self.expected.check(&guest.identity)?;
        if self.used {
            let text = "this QEMU has had a guest already: start a new one".to_owned();
            return Err(PrepareError::Incompatible(text));
        }
        let offered: Offered = serde_json::from_slice(&guest.config)
            .map_err(|error| PrepareError::Incompatible(format!("its description: {error}")))?;
        if let Some(difference) = machine::difference(&offered.machine, &self.machine) {
            return Err(PrepareError::Incompatible(difference));
        }
        compare(&offered.blocks, &self.ram.blocks)?;
        if offered.host == host() {
            let ours = || self.ram.carried().map(|block| block.file);
            let theirs = offered.blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
            for block in theirs {
                if ours().any(|file| file == block.file) {
                    let path = PathBuf::from(&block.name);
                    return Err(PrepareError::Vm(QemuError::SameFile { path }.into()));
                }
            }
        }
        self.punch().map_err(|error| PrepareError::Vm(error.into()))?;
        // Now, and not while the guest stands still.
        Settings::for_loading(&mut self.qmp)
            .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
        Ok(Landing::Memory(self.ram.memory.clone()))
    }

    fn load(&mut self, bytes: &[u8]) -> Result<(), VmError> {
        self.used = true;
        state::load(&mut self.qmp, bytes)?;
        let status = self.qmp.execute("query-status", json!({}))?;
        if status["running"] == true {
            return Err("QEMU runs the guest before it may".into());
        }
        Ok(())
    }

    fn discard(&mut self) {
        // One that has loaded a state can't take another; one that has not can be filled anew.
        let _ = if self.used {
            self.quit()
        } else {
            self.punch().and_then(|()| Ok(self.settings.restore(&mut self.qmp)?))
        };
    }

    fn is_spent(&self) -> bool {
        self.used
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.qmp.execute("cont", json!({}))?;
        // The guest runs. Settings are worth no failure.
        let _ = self.settings.restore(&mut self.qmp);
        Ok(())
    }
}

/// Both QEMUs must have the same blocks, carried by the same side.
fn compare(theirs: &[Block], ours: &[Block]) -> Result<(), PrepareError> {
    let words = |blocks: &[Block]| {
        let all: Vec<String> = blocks
            .iter()
            .filter(|block| block.carrier == Carrier::Vmferry)
            .map(|block| format!("{} of {} MiB", block.name, block.bytes >> 20))
            .collect();
        all.join(", ")
    };
    let carried = |blocks: &[Block]| -> Vec<(String, u64)> {
        let ours = blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
        ours.map(|block| (block.name.clone(), block.bytes)).collect()
    };
    if carried(theirs) == carried(ours) {
        return Ok(());
    }
    Err(PrepareError::Layout { expected: words(ours), offered: words(theirs) })
}
