//! The devices: a serial port and pvpanic on I/O ports, and the MMIO device, if there is one.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use super::KvmError;
use super::mmio::MmioWiring;
use super::stop::{GuestStop, StopCause, StopRecord};
use crate::state::{Section, SectionKind, StateReader, StateWriter};

/// COM1, as on every PC.
const SERIAL_PORT: u16 = 0x3f8;
/// Registers of a UART.
const SERIAL_PORTS: u16 = 8;
/// COM1's interrupt line.
pub(super) const SERIAL_GSI: u32 = 4;
/// The port of the pvpanic device.
const PVPANIC_PORT: u16 = 0x505;
/// The only event that this pvpanic device supports.
const PVPANIC_PANICKED: u8 = 1;
/// How much of the serial output is kept: the last 64 KiB, thousands of lines.
const SERIAL_KEPT_BYTES: usize = 64 << 10;

pub(super) const SERIAL: SectionKind = SectionKind::mandatory("serial", 1);

/// All devices that are emulated in user space.
pub(super) struct Devices {
    serial: Mutex<Serial<Interrupt, NoEvents, SerialOutput>>,
    output: SerialOutput,
    stop: Arc<StopRecord>,
    mmio: Option<MmioWiring>,
}

impl Devices {
    pub(super) fn new(
        interrupt: EventFd,
        sink: Option<Box<dyn Write + Send>>,
        stop: Arc<StopRecord>,
        mmio: Option<MmioWiring>,
    ) -> Self {
        let output = SerialOutput(Arc::new(Mutex::new(Output { kept: VecDeque::new(), sink })));
        let interrupt = Interrupt(Arc::new(interrupt));
        Self { serial: Mutex::new(Serial::new(interrupt, output.clone())), output, stop, mmio }
    }

    /// The guest wrote `data` to `port`. Writes to ports without a device are discarded.
    pub(super) fn write(&self, vcpu: u32, port: u16, data: &[u8]) {
        if let Some(register) = serial_register(port) {
            let mut serial = self.serial();
            for &byte in data {
                // Fails if the sink fails or the interrupt's counter is full. The guest can do
                // nothing about either.
                let _ = serial.write(register, byte);
            }
        } else if port == PVPANIC_PORT
            && data.first().is_some_and(|&byte| byte & PVPANIC_PANICKED != 0)
        {
            self.stop.record(GuestStop { vcpu, rip: None, cause: StopCause::Panicked });
        }
    }

    /// The guest reads `data` from `port`. Ports without a device read as all ones.
    pub(super) fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(register) = serial_register(port) {
            let mut serial = self.serial();
            data.iter_mut().for_each(|byte| *byte = serial.read(register));
        } else if port == PVPANIC_PORT {
            data.fill(PVPANIC_PANICKED);
        }
    }

    /// The guest reads from an address outside memory. Addresses without a device read as all
    /// ones, as on a PC.
    pub(super) fn read_address(&self, address: u64, data: &mut [u8]) {
        match self.at(address, data.len()) {
            Some((wiring, offset)) => wiring.device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes to an address outside memory. Writes to addresses without a device are
    /// discarded.
    pub(super) fn write_address(&self, address: u64, data: &[u8]) {
        if let Some((wiring, offset)) = self.at(address, data.len()) {
            wiring.device.write(offset, data);
        }
    }

    fn at(&self, address: u64, bytes: usize) -> Option<(&MmioWiring, u64)> {
        let wiring = self.mmio.as_ref()?;
        let offset = address.checked_sub(wiring.address)?;
        (offset + bytes as u64 <= wiring.bytes).then_some((wiring, offset))
    }

    /// The last 64 KiB of the guest's serial output.
    pub(super) fn serial_text(&self) -> String {
        let output = self.output.0.lock();
        let bytes: Vec<u8> = output.kept.iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(super) fn save(&self, out: &mut StateWriter) -> Result<(), KvmError> {
        write_serial(&self.serial().state(), out)
    }

    pub(super) fn load(&self, state: &SerialState) -> Result<(), KvmError> {
        let mut serial = self.serial();
        let interrupt = serial.interrupt_evt().clone();
        let loaded = Serial::from_state(state, interrupt, NoEvents, self.output.clone());
        *serial =
            loaded.map_err(|error| KvmError::Config { reason: format!("serial port: {error}") })?;
        Ok(())
    }

    pub(super) fn serial(&self) -> MutexGuard<'_, Serial<Interrupt, NoEvents, SerialOutput>> {
        self.serial.lock()
    }
}

/// Appends the serial port's section.
pub(super) fn write_serial(state: &SerialState, out: &mut StateWriter) -> Result<(), KvmError> {
    let mut bytes = registers(state).to_vec();
    bytes.extend_from_slice(&state.in_buffer);
    Ok(out.section(&SERIAL, 0, &bytes)?)
}

/// Parses the serial port's section.
pub(super) fn read_serial(from: &StateReader<'_>) -> Result<SerialState, KvmError> {
    let section: Section<'_> = from.section(&SERIAL, 0)?;
    let (registers, in_buffer) = match section.payload().split_first_chunk::<9>() {
        Some((registers, rest)) if rest.len() <= 64 => (registers, rest.to_vec()),
        _ => {
            return Err(section
                .invalid(format!("{} bytes, expected 9 to 73", section.payload().len()))
                .into());
        }
    };
    let &[
        baud_divisor_low,
        baud_divisor_high,
        interrupt_enable,
        interrupt_identification,
        line_control,
        line_status,
        modem_control,
        modem_status,
        scratch,
    ] = registers;
    Ok(SerialState {
        baud_divisor_low,
        baud_divisor_high,
        interrupt_enable,
        interrupt_identification,
        line_control,
        line_status,
        modem_control,
        modem_status,
        scratch,
        in_buffer,
    })
}

fn registers(state: &SerialState) -> [u8; 9] {
    [
        state.baud_divisor_low,
        state.baud_divisor_high,
        state.interrupt_enable,
        state.interrupt_identification,
        state.line_control,
        state.line_status,
        state.modem_control,
        state.modem_status,
        state.scratch,
    ]
}

fn serial_register(port: u16) -> Option<u8> {
    let register = port.checked_sub(SERIAL_PORT).filter(|&register| register < SERIAL_PORTS)?;
    u8::try_from(register).ok()
}

/// The serial port's interrupt line: an irqfd.
#[derive(Clone)]
pub(super) struct Interrupt(Arc<EventFd>);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Receives the serial output: keeps the last part of it, and passes all of it on to the sink.
#[derive(Clone)]
pub(super) struct SerialOutput(Arc<Mutex<Output>>);

struct Output {
    kept: VecDeque<u8>,
    sink: Option<Box<dyn Write + Send>>,
}

impl Write for SerialOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut output = self.0.lock();
        for &byte in bytes {
            if output.kept.len() == SERIAL_KEPT_BYTES {
                output.kept.pop_front();
            }
            output.kept.push_back(byte);
        }
        if let Some(sink) = &mut output.sink {
            sink.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut output = self.0.lock();
        output.sink.as_mut().map_or(Ok(()), Write::flush)
    }
}
