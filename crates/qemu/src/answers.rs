//! The parsers of QMP's answers, one by one, for the fuzz target. Not part of the public interface.

use crate::carried::Description;
use crate::direct_view::DirectView;
use crate::error::QemuError;
use crate::inventory::{Allowed, Inventory};
use crate::qmp::Qmp;
use crate::settings::Settings;
use crate::{guest, located, machine, state, writers};

/// The number of readers that [`read`] has.
pub const READERS: u8 = 12;

/// Runs one of the readers against QEMU, and returns its result as text.
///
/// # Errors
/// QMP errors, and reasons against a migration.
pub fn read(qmp: &mut Qmp, reader: u8) -> Result<String, QemuError> {
    Ok(match reader % READERS {
        0 => format!("{:?}", machine::look(qmp)?),
        1 => format!("{:?}", writers::all_seen(qmp)?),
        2 => format!("{:?}", machine::vcpu_threads(qmp)?),
        3 => format!("{:?}", located::list_with_addresses(qmp)?),
        4 => format!("{:?}", guest::identity(qmp)?),
        5 => format!("{:?}", guest::must_be_migratable(qmp)?),
        6 => format!("{:?}", guest::loses_writes(qmp)?),
        7 => format!("{:?}", Settings::read(qmp)?),
        8 => {
            let own = Description::read(qmp, 0)?;
            format!("{:?} {:?} {:?}", own.layout(), own.blocks().last(), own.check(&own).is_ok())
        }
        9 => {
            let own = Inventory::read(qmp, &mut DirectView)?;
            format!("{own:?} {:?}", own.differences(&own, Allowed::default()))
        }
        10 => {
            qmp.execute("query-migrate", serde_json::json!({}))?;
            let age = qmp.take_event("STOP").map(|event| state::age(&event["timestamp"]));
            format!("{age:?}")
        }
        _ => format!("{:?} {}", qmp.events()?, qmp.has_news()),
    })
}
