//! Which pages of a guest's memory a QEMU has, and their contents.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use vmferry_qemu_lab::{Backend, Machine, Qemu};

pub const PAGE: u64 = 4096;

/// The content of a page.
pub type Content = [u8; PAGE as usize];

/// The memory of a guest, of one memory backend.
pub struct Pages {
    count: u64,
    place: Place,
}

enum Place {
    File(File),
    /// A private mapping, as `/proc` shows it.
    Process {
        pagemap: File,
        memory: File,
        address: u64,
    },
}

impl Pages {
    pub fn of(qemu: &Qemu, machine: &Machine) -> Self {
        let count = (machine.mib << 20) / PAGE;
        let place = match machine.backend {
            Backend::File => Place::File(File::open(&qemu.memory_files()[0]).unwrap()),
            Backend::Private => {
                let process = format!("/proc/{}", qemu.child.id());
                let open = |name: &str| File::open(format!("{process}/{name}")).unwrap();
                let maps = std::fs::read_to_string(format!("{process}/maps")).unwrap();
                let address = maps.lines().find_map(|line| mapping(line, machine.mib << 20));
                let address = address.expect("the guest's memory is mapped");
                Place::Process { pagemap: open("pagemap"), memory: open("mem"), address }
            }
            other => panic!("{other:?} is not read here"),
        };
        Self { count, place }
    }

    /// The pages that are not there.
    pub fn missing(&self) -> Vec<u64> {
        (0..self.count).filter(|page| !self.is_there(*page)).collect()
    }

    /// The pages that are not there, and not zero at the source: a page of zeros stays a hole.
    pub fn missing_of(&self, source: &Self) -> Vec<u64> {
        let mut missing = self.missing();
        missing.retain(|page| source.content(*page) != [0; PAGE as usize]);
        missing
    }

    pub fn is_there(&self, page: u64) -> bool {
        match &self.place {
            // Fails behind the last data.
            Place::File(file) => {
                seek(file, SeekFrom::Data(page * PAGE)).is_ok_and(|at| at == page * PAGE)
            }
            Place::Process { pagemap, address, .. } => {
                let mut entry = [0; 8];
                pagemap.read_exact_at(&mut entry, (address / PAGE + page) * 8).unwrap();
                // In memory, or in swap.
                entry[7] & 0xc0 != 0
            }
        }
    }

    /// The content of a page that is there, or of the source's.
    pub fn content(&self, page: u64) -> Content {
        let mut bytes = [0; PAGE as usize];
        let (file, start) = match &self.place {
            Place::File(file) => (file, 0),
            Place::Process { memory, address, .. } => (memory, *address),
        };
        file.read_exact_at(&mut bytes, start + page * PAGE).unwrap();
        bytes
    }

    /// All contents; `None` for a page that is not there.
    pub fn all(&self) -> Vec<Option<Content>> {
        let page = |page| self.is_there(page).then(|| self.content(page));
        (0..self.count).map(page).collect()
    }
}

/// The address of an anonymous mapping of this length, if the line of `/proc/PID/maps` has it.
fn mapping(line: &str, bytes: u64) -> Option<u64> {
    let mut words = line.split_whitespace();
    let (range, file) = (words.next()?, words.nth(4));
    let (start, end) = range.split_once('-')?;
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).ok());
    (end? - start? == bytes && file.is_none()).then_some(start?)
}
