//! Disks that only one host has.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::PathBuf;

use anyhow::ensure;
use fastrand::Rng;
use vmferry_libvirt_lab::{Disk, ImageFormat};

use super::lab::{Host, Lab};
use crate::compression::content::{CHUNK_BYTES, Content, Pool};

/// Bytes of different program files, so that the image repeats only after long distances.
const POOL_BYTES: usize = 64 << 20;

/// A disk with an image on each host.
pub struct LocalDisk<'a> {
    lab: &'a Lab,
    pub disk: Disk,
    mib: u64,
}

impl<'a> LocalDisk<'a> {
    /// Creates the images, and fills the first host's with program files.
    pub fn create(lab: &'a Lab, mib: u64) -> anyhow::Result<Self> {
        let create = |host: &Host| host.libvirt.create_disk("bench.raw", mib, ImageFormat::Raw);
        // It has the same path on both hosts.
        let [disk, _] = lab.hosts.each_ref().map(create);
        let local = Self { lab, disk, mib };
        let pool = Pool::new(Content::Program, POOL_BYTES)?;
        let mut image = BufWriter::new(File::options().write(true).open(local.image(0))?);
        let mut random = Rng::with_seed(3);
        for _ in 0..(mib << 20) / CHUNK_BYTES as u64 {
            image.write_all(pool.chunk(&mut random))?;
        }
        image.into_inner()?.sync_all()?;
        Ok(local)
    }

    /// Makes the image of a host empty.
    pub fn empty(&self, host: usize) -> anyhow::Result<()> {
        let image = File::create(self.image(host))?;
        image.set_len(self.mib << 20)?;
        Ok(image.sync_all()?)
    }

    /// Compares both images.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut images = [File::open(self.image(0))?, File::open(self.image(1))?];
        let mut pieces = [vec![0; 1 << 20], vec![0; 1 << 20]];
        for piece in 0..self.mib {
            for (image, bytes) in images.iter_mut().zip(&mut pieces) {
                image.read_exact(bytes)?;
            }
            ensure!(pieces[0] == pieces[1], "the images differ in MiB {piece}");
        }
        Ok(())
    }

    fn image(&self, host: usize) -> PathBuf {
        self.lab.hosts[host].libvirt.path(&self.disk.path)
    }
}
