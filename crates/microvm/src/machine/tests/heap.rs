//! The workloads of the guest's heap, in complete guests.

use super::*;
use crate::account::FreeAccount;

const LINE: &str = "ticks hot=2,rate=20000 freed=40 churn=20 poison";

#[test]
fn churn_survives_repeated_moves() {
    for kind in KINDS {
        let config = config(kind, 2, LINE);
        let mut machine = started(config.clone());
        for _ in 0..3 {
            let before = machine.report().unwrap();
            wait_for(&machine, "churned", |now| now.buffers_freed > before.buffers_freed + 20);
            machine.pause().unwrap();
            let account = FreeAccount::read(machine.memory()).unwrap().unwrap();
            let mut next = Machine::new(config.clone()).unwrap();
            copy(&machine.memory().populated().unwrap(), machine.memory(), next.memory());
            next.load(&machine.save().unwrap()).unwrap();
            assert_eq!(FreeAccount::read(next.memory()).unwrap().unwrap(), account);
            next.resume().unwrap();
            assert_eq!(check_all(&next).corruptions, 0, "{kind}: {:?}", next.report());
            machine = next;
        }
        let (name, report) = migrate_from(machine, &config, |machine| machine.dirty_log().unwrap());
        assert_eq!(report.corruptions, 0, "{kind} {name}: {report:?}");
    }
}

/// Free pages of the account need not be copied, as long as they are filled with poison again.
#[test]
fn free_pages_of_the_account_need_not_be_moved() {
    for kind in KINDS {
        for (line, poison) in [("freed=40 churn=20", 0), ("freed=40 churn=20 poison", 0xaa)] {
            let mut machine = started(config(kind, 2, line));
            let before = machine.report().unwrap();
            wait_for(&machine, "churned", |now| now.buffers_freed > before.buffers_freed + 20);
            machine.pause().unwrap();
            let account = FreeAccount::read(machine.memory()).unwrap().unwrap();
            let mut moved = machine.memory().populated().unwrap();
            let whole = moved.count();
            moved.subtract(&account.pages);
            assert!(moved.count() + 20 * MIB / 4096 / 2 < whole, "{} of {whole}", moved.count());
            let mut next = Machine::new(config(kind, 2, line)).unwrap();
            copy(&moved, machine.memory(), next.memory());
            for run in account.used.runs() {
                let bytes = vec![poison; run.pages as usize * vmferry_memory::PAGE_SIZE];
                next.memory().copy_in(run, &bytes).unwrap();
            }
            next.load(&machine.save().unwrap()).unwrap();
            next.resume().unwrap();
            let before = next.report().unwrap();
            wait_for(&next, "churned", |now| {
                now.buffers_allocated > before.buffers_allocated + 200
            });
            assert_eq!(check_all(&next).corruptions, 0, "{kind} {line}: {:?}", next.report());
        }
    }
}
