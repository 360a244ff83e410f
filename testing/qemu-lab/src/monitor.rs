//! A QMP client without vmferry, for QEMUs that are moved or prepared without it.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use crate::{LOOK_PERIOD, PATIENCE};

/// Whether a QEMU executes orders. It listens, and greets its clients, before its machine and the
/// files of its memory exist.
pub(crate) fn executes_orders(qmp: &Path) -> bool {
    let ask = || {
        let mut orders = UnixStream::connect(qmp)?;
        orders.set_read_timeout(Some(PATIENCE))?;
        writeln!(orders, "{}", json!({ "execute": "qmp_capabilities" }))?;
        let mut answers = BufReader::new(&orders);
        let mut answer = String::new();
        while !answer.contains("return") {
            answer.clear();
            if answers.read_line(&mut answer)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        // It serves one client at a time: the next one finds it free.
        orders.shutdown(Shutdown::Write)?;
        std::io::copy(&mut orders, &mut std::io::sink())
    };
    ask().is_ok()
}

/// A connection to the monitor of a QEMU.
pub struct Monitor {
    orders: UnixStream,
    answers: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects to a QMP socket that listens.
    #[must_use]
    pub fn connect(qmp: &Path) -> Self {
        let orders = UnixStream::connect(qmp).expect("QMP listens");
        let answers = orders.try_clone().expect("a descriptor can be duplicated");
        let mut monitor = Self { orders, answers: BufReader::new(answers) };
        monitor.execute("qmp_capabilities", json!({}));
        monitor
    }

    /// Executes a command and returns its result. Events are dropped.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let order = json!({ "execute": command, "arguments": arguments });
        self.send(&order).expect("QMP takes orders");
        loop {
            let mut line = String::new();
            self.answers.read_line(&mut line).expect("QMP answers");
            let mut answer: Value = serde_json::from_str(&line).expect("QMP answers");
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if answer.get("return").is_some() {
                return answer["return"].take();
            }
        }
    }

    /// Sends an order in one write: QEMU executes it as soon as its last brace has come, and once
    /// it has quit, a line feed that follows in a write of its own fails.
    fn send(&mut self, order: &Value) -> std::io::Result<()> {
        self.orders.write_all(format!("{order}\n").as_bytes())
    }

    /// Tells QEMU to end, and waits until it has closed the socket. QEMU does not promise to answer
    /// this command, and it resets the connection if it has not read everything.
    pub(crate) fn quit(mut self) -> std::io::Result<()> {
        self.send(&json!({ "execute": "quit" }))?;
        let _ = std::io::copy(&mut self.answers, &mut std::io::sink());
        Ok(())
    }

    /// Repeats a query until its result is wanted, and returns that.
    pub fn wait_for(&mut self, query: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let result = self.execute(query, json!({}));
            if wanted(&result) {
                return result;
            }
            assert!(Instant::now() < deadline, "{query}: {result}");
            // A result that changes causes no wake-up.
            std::thread::sleep(LOOK_PERIOD);
        }
    }
}
