//! Converts requests into the engine's types, and errors into answers.

use vmferry_control::{ControlError, ErrorCode, MigrateRequest, RecordRequest, Replies};
use vmferry_transport::{Address, Dialer, Recorder, RecordingSide};

use crate::error::MachineError;

pub(super) fn dialer(request: &MigrateRequest, replies: &Replies) -> Result<Dialer, ControlError> {
    let address: Address = request.to.parse().map_err(|error| bad_request(&error))?;
    if let Address::Fd(_) = address {
        let mut dialer =
            Dialer::over(replies.take_descriptors()).map_err(|error| bad_request(&error))?;
        // Sockets of the caller have no server name, so a request for one is refused.
        dialer.destination_id = request.tls.as_ref().and_then(|files| files.destination_id.clone());
        return Ok(dialer);
    }
    let mut dialer = match &request.tls {
        Some(files) => files
            .dialer_opened(address, replies.take_descriptors())
            .map_err(|error| ControlError::from(&vmferry::MigrateError::from(error)))?,
        None => Dialer::new(address, None),
    };
    dialer.known_addresses.clone_from(&request.addresses);
    Ok(dialer)
}

/// The recorder that the request asks for. `messages` receives the reason if it ends early.
pub(super) fn recorder(
    request: &MigrateRequest,
    messages: std::sync::mpsc::Sender<String>,
) -> Result<Option<Recorder>, ControlError> {
    let Some(RecordRequest { directory, limit }) = &request.record else { return Ok(None) };
    let recorder = Recorder::new(directory, RecordingSide::Source, *limit)
        .map_err(|error| bad_request(&error))?;
    recorder.on_end(move |text| {
        // Fails if the migration is over.
        let _ = messages.send(text.to_owned());
    });
    Ok(Some(recorder))
}

pub(super) fn bad_request(error: &dyn std::error::Error) -> ControlError {
    ControlError::new(ErrorCode::BadRequest, vmferry::chain(error))
}

pub(super) fn machine_error(error: MachineError) -> ControlError {
    let code = match &error {
        MachineError::Config { .. } => ErrorCode::BadRequest,
        MachineError::WrongState { .. } => ErrorCode::WrongState,
        _ => ErrorCode::Internal,
    };
    ControlError::new(code, vmferry::chain(&error))
}
