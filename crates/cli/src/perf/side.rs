//! The protocol between the client and the server of `anywarp ping` and `anywarp blast` over TCP: one JSON object per
//! line.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The first word of both ends. It distinguishes an `anywarp ping` or `blast` server from another program on the port.
const MAGIC: &str = "anywarp-perf-3";

/// The longest line that is accepted, in bytes.
const LONGEST: u64 = 1 << 16;

/// The longest time until a connection is established, and until the greeting of the other end has arrived.
const GREETING: Duration = Duration::from_secs(5);

/// The longest silence of a running end, which sends a message each second.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

/// Parameters or results by name: those of the *verbs program*, which each end starts for each run, and which does the measurement.
pub(crate) type Numbers = BTreeMap<String, u64>;

/// A message (one line).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Word {
    /// Both ends: the first message.
    Greeting { magic: String, version: String },
    /// Client: the parameters of the next run.
    Run(Numbers),
    /// Both ends: the queue pair, as a line of the verbs program.
    Pair(String),
    /// Server: the queue pair is connected and receives are posted.
    Armed,
    /// Client: the number of messages sent.
    Stop { sent: u64 },
    /// Server: the results.
    Seen(Numbers),
    /// Both ends: the run failed, with the reason.
    Failed(String),
    /// Both ends: a keep-alive message.
    Tick,
    /// Client: there are no more runs.
    End,
}

/// An event at an end.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message from the other end.
    Word(Word),
    /// The other end has disconnected, with the reason.
    Gone(String),
    /// A line that the verbs program of run `of` printed.
    Line { of: u64, line: String },
    /// The verbs program of run `of` has ended.
    Ended { of: u64 },
}

/// The writing half of the connection. A thread has the reading half, and sends an event for each message.
#[derive(Debug)]
pub(crate) struct Side {
    stream: TcpStream,
}

impl Side {
    /// Exchanges greetings with the other end of `stream`. Later messages become events.
    pub(crate) fn greet(stream: TcpStream, events: Sender<Event>) -> Result<Self, String> {
        let failed = |e: io::Error| format!("the control connection fails: {e}");
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_read_timeout(Some(GREETING)).map_err(failed)?;
        stream.set_write_timeout(Some(GREETING)).map_err(failed)?;
        let mut side = Self {
            stream: stream.try_clone().map_err(failed)?,
        };
        side.send(&Word::Greeting {
            magic: MAGIC.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })?;
        let mut reader = BufReader::new(stream);
        match read(&mut reader) {
            Ok(Word::Greeting { magic, .. }) if magic == MAGIC => {}
            Ok(Word::Greeting { magic, .. }) => {
                return Err(format!(
                    "its protocol is {magic}, and that of this end is {MAGIC}: install the same version at both ends"
                ));
            }
            Ok(_) | Err(Unread::Foreign) => {
                return Err(
                    "it is not an end of `anywarp ping` or `anywarp blast`: is the port right?"
                        .to_owned(),
                );
            }
            Err(Unread::Closed) => {
                return Err(
                    "it closes the connection without a greeting: is the port right?".to_owned(),
                );
            }
            Err(Unread::Failed(e)) if is_timeout(&e) => {
                return Err(format!(
                    "it sends nothing for {} s: is the port right?",
                    GREETING.as_secs()
                ));
            }
            Err(Unread::Failed(e)) => return Err(failed(e)),
        }
        reader
            .get_ref()
            .set_read_timeout(Some(SILENCE))
            .map_err(failed)?;
        thread::spawn(move || {
            loop {
                let gone = match read(&mut reader) {
                    Ok(word) => {
                        if events.send(Event::Word(word)).is_err() {
                            return;
                        }
                        continue;
                    }
                    Err(Unread::Closed) => "the other end has disconnected".to_owned(),
                    Err(Unread::Foreign) => "the other end sent an invalid message".to_owned(),
                    Err(Unread::Failed(e)) if is_timeout(&e) => {
                        format!("the other end has sent nothing for {} s", SILENCE.as_secs())
                    }
                    Err(Unread::Failed(e)) => format!("the other end has disconnected: {e}"),
                };
                let _receiver_gone = events.send(Event::Gone(gone));
                return;
            }
        });
        Ok(side)
    }

    /// Sends one message.
    pub(crate) fn send(&mut self, word: &Word) -> Result<(), String> {
        let mut line = serde_json::to_string(word).map_err(|e| e.to_string())?;
        line.push('\n');
        self.stream
            .write_all(line.as_bytes())
            .map_err(|e| format!("the other end has disconnected: {e}"))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _gone_already = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Why no message was read.
enum Unread {
    Closed,
    Foreign,
    Failed(io::Error),
}

fn read(reader: &mut impl BufRead) -> Result<Word, Unread> {
    let mut line = Vec::new();
    let n = reader
        .by_ref()
        .take(LONGEST)
        .read_until(b'\n', &mut line)
        .map_err(|e| {
            if line.is_empty() || is_timeout(&e) {
                Unread::Failed(e)
            } else {
                Unread::Foreign
            }
        })?;
    if n == 0 {
        return Err(Unread::Closed);
    }
    serde_json::from_slice(&line).map_err(|_| Unread::Foreign)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Connects to `host`, trying each of its addresses.
pub(crate) fn connect(host: &str, port: u16) -> Result<TcpStream, String> {
    use std::net::ToSocketAddrs;

    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|e| format!("{host}: no such machine: {e}"))?;
    let mut why = format!("{host} has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, GREETING) {
            Ok(stream) => return Ok(stream),
            Err(e) => why = format!("{address} does not answer: {e}; is `--server` running there?"),
        }
    }
    Err(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::mpsc;

    /// Greets an end that sends `words` and then waits until the connection is closed.
    fn greet(words: &'static [u8]) -> (Result<Side, String>, mpsc::Receiver<Event>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(words).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let _until_it_goes = stream.read_to_end(&mut Vec::new());
        });
        let (sender, events) = mpsc::channel();
        (
            Side::greet(TcpStream::connect(address).unwrap(), sender),
            events,
        )
    }

    #[test]
    fn a_port_of_another_program_is_recognized() {
        let cases: [(&[u8], &str); 5] = [
            (b"SSH-2.0-OpenSSH_9.2\r\n", "is not an end"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not an end"),
            (b"", "without a greeting"),
            (b"\"tick\"\n", "is not an end"),
            (
                b"{\"greeting\":{\"magic\":\"anywarp-perf-0\",\"version\":\"0\"}}\n",
                "same version",
            ),
        ];
        for (words, expected) in cases {
            let (side, _events) = greet(words);
            let why = side.unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn a_lost_connection_is_detected() {
        let (side, events) =
            greet(b"{\"greeting\":{\"magic\":\"anywarp-perf-3\",\"version\":\"0\"}}\n\"tick\"\n");
        let _side = side.unwrap();

        assert!(matches!(events.recv().unwrap(), Event::Word(Word::Tick)));
        assert!(matches!(events.recv().unwrap(), Event::Gone(_)));
    }

    #[test]
    fn endless_lines_are_not_stored() {
        let long = vec![b'x'; 1 << 20];
        assert!(matches!(read(&mut &long[..]), Err(Unread::Foreign)));
    }
}
