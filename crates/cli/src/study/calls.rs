//! A client of a SIP server (RFC 3261): makes calls, one at a time, and measures the time from each INVITE to its response 200.
//!
//! SIPp's own client cannot measure this: its clock advances in steps of milliseconds.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use super::args::Calls;

/// The time limit of one response.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The longest message of the server.
const LONGEST: usize = 16_384;

/// The number of calls before those that are measured.
const WARM_UP: usize = 10;

/// The connection to the server. With UDP each datagram is one message.
enum Connection {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

impl Connection {
    fn open(server: SocketAddr, tcp: bool) -> io::Result<(Self, SocketAddr)> {
        if tcp {
            let stream = TcpStream::connect_timeout(&server, TIMEOUT)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.set_nodelay(true)?;
            let own = stream.local_addr()?;
            return Ok((Self::Tcp(stream), own));
        }
        let socket = UdpSocket::bind((server.ip(), 0))?;
        socket.connect(server)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let own = socket.local_addr()?;
        Ok((Self::Udp(socket), own))
    }

    fn send(&mut self, message: &str) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.write_all(message.as_bytes()),
            Self::Udp(socket) => socket.send(message.as_bytes()).map(drop),
        }
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Udp(socket) => socket.recv(into),
        }
    }
}

/// Returns the length of the first message in `bytes`, if all of it is there: a header, an empty line, and the body.
fn first_message(bytes: &str) -> Option<usize> {
    let header = bytes.find("\r\n\r\n")? + 4;
    let length = bytes.get(..header)?.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse::<usize>().ok())?
    });
    let end = header.checked_add(length.unwrap_or(0))?;
    (end <= bytes.len()).then_some(end)
}

/// A client with its connection.
struct Client {
    connection: Connection,
    own: SocketAddr,
    server: SocketAddr,
    /// Received bytes of messages that are not complete.
    received: String,
}

impl Client {
    fn request(&self, method: &str, call: usize, sequence: usize) -> String {
        let (own, server) = (self.own, self.server);
        let transport = match self.connection {
            Connection::Tcp(_) => "TCP",
            Connection::Udp(_) => "UDP",
        };
        format!(
            "{method} sip:service@{server} SIP/2.0\r\n\
             Via: SIP/2.0/{transport} {own};branch=z9hG4bK-{call}-{sequence}-{method}\r\n\
             From: study <sip:study@{own}>;tag={call}\r\n\
             To: service <sip:service@{server}>\r\n\
             Call-ID: {call}-{own}\r\n\
             CSeq: {sequence} {method}\r\n\
             Contact: <sip:study@{own}>\r\n\
             Max-Forwards: 70\r\n\
             Content-Length: 0\r\n\r\n"
        )
    }

    /// Waits for the response 200 of a call.
    fn wait(&mut self, call: usize) -> io::Result<()> {
        let mut bytes = [0; LONGEST];
        loop {
            while let Some(end) = first_message(&self.received) {
                let message: String = self.received.drain(..end).collect();
                let ours = message.contains(&format!("Call-ID: {call}-"));
                if ours && message.starts_with("SIP/2.0 200") {
                    return Ok(());
                }
            }
            let got = self.connection.receive(&mut bytes)?;
            let text = bytes.get(..got).map(str::from_utf8);
            match text {
                Some(Ok(text)) if got > 0 && self.received.len() < LONGEST => {
                    self.received.push_str(text);
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    /// Makes a call. Returns the time until the server has answered it.
    fn call(&mut self, number: usize) -> io::Result<Duration> {
        let began = Instant::now();
        self.connection.send(&self.request("INVITE", number, 1))?;
        self.wait(number)?;
        let took = began.elapsed();
        self.connection.send(&self.request("ACK", number, 1))?;
        self.connection.send(&self.request("BYE", number, 2))?;
        self.wait(number)?;
        Ok(took)
    }
}

/// Makes the calls. Returns the median of their times as JSON.
pub(crate) fn run(args: &Calls) -> Result<String, String> {
    let failed = |e: io::Error| format!("{}: {e}", args.server);
    let (connection, own) = Connection::open(args.server, args.tcp).map_err(failed)?;
    let mut client = Client {
        connection,
        own,
        server: args.server,
        received: String::new(),
    };
    let mut times = Vec::new();
    for number in 0..args.count + WARM_UP {
        let took = client.call(number).map_err(failed)?;
        if number >= WARM_UP {
            times.push(took);
        }
    }
    times.sort();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    Ok(format!("{{\"us\": {:.3}}}", median.as_secs_f64() * 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_end_with_their_bodies() {
        let message = "SIP/2.0 200 OK\r\nContent-Length: 4\r\n\r\nv=0\n";
        assert_eq!(first_message(message), Some(message.len()));
        assert_eq!(
            first_message(&format!("{message}SIP/2.0")),
            Some(message.len())
        );
        assert_eq!(first_message(&message[..message.len() - 1]), None);
        assert_eq!(
            first_message("SIP/2.0 180 Ringing\r\n\r\n"),
            Some("SIP/2.0 180 Ringing\r\n\r\n".len())
        );
        let huge = "A: b\r\nContent-Length: 18446744073709551615\r\n\r\n";
        assert_eq!(first_message(huge), None);
    }
}
