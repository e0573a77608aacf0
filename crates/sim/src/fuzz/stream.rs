//! Any bytes on the stream of an open connection.

use super::input::Input;
use super::target::Target;

/// The input chooses the set-up, and contains the bytes that the peer sends.
pub fn stream(data: &[u8]) {
    let mut input = Input::new(data);
    let mut target = Target::new(&mut input);
    let closes = input.byte() & 1 != 0;
    let peer = target.peer;
    target.w[peer].sends_bytes(input.rest());
    if closes {
        target.w[peer].closes();
    }
    target.check();
}
