//! An echo server and its client, as two tasks: `anywarp run -- cargo run --package anywarp-exs-async --example echo`. The
//! program also tests error cases.

mod executor;

use executor::block_on;
use exs_async::{Buffer, Listener, Socket};
use std::io;
use std::thread;

/// Sends back all data until its end.
async fn serve(listener: Listener) -> io::Result<usize> {
    let socket = listener.accept().await?;
    let mut buffer = Buffer::new(1 << 20)?;
    let mut messages = 0;
    loop {
        let (received, full) = socket.recv(buffer).await;
        let length = received?;
        if length == 0 {
            return Ok(messages);
        }
        let (sent, empty) = socket.send(full, length).await;
        sent?;
        buffer = empty;
        messages += 1;
    }
}

async fn call(addr: std::net::SocketAddr) -> io::Result<()> {
    let socket = Socket::connect(addr).await?;
    for length in [1, 1000, 1 << 20] {
        let mut out = Buffer::new(length)?;
        for (i, byte) in out.iter_mut().enumerate() {
            *byte = (i % 251) as u8;
        }
        // The receive is posted before the message that it receives is sent.
        let answer = socket.recv(Buffer::new(length)?);
        let (sent, out) = socket.send(out, length).await;
        assert_eq!(sent?, length);
        let (received, answer) = answer.await;
        assert_eq!(received?, length);
        assert_eq!(*answer, *out);
        println!("{length} bytes came back");
    }
    // A length larger than the buffer is refused, and the buffer is returned.
    let (refused, small) = socket.send(Buffer::new(10)?, 11).await;
    let kind = refused.err().map(|error| error.kind());
    assert_eq!(kind, Some(io::ErrorKind::PermissionDenied));
    assert_eq!(small.len(), 10);
    // Dropping a future cancels its operation: the next receive gets the next message, and the buffer of the first is not written to.
    drop(socket.recv(small));
    let (sent, out) = socket.send(Buffer::new(7)?, 7).await;
    assert_eq!(sent?, 7);
    let (received, _) = socket.recv(out).await;
    assert_eq!(received?, 7);
    socket.shutdown().await?;
    Ok(())
}

/// A stream whose receives wait for all bytes.
async fn stream(listener: Listener, addr: std::net::SocketAddr) -> io::Result<()> {
    let accepted = thread::spawn(move || block_on(listener.accept()));
    let client = Socket::connect_stream(addr).await?;
    let server = accepted
        .join()
        .map_err(|_| io::Error::other("the server panicked"))??;
    let all = server.recv_all(Buffer::new(3000)?);
    let mut out = Buffer::new(1000)?;
    for byte in 1..=3 {
        out.fill(byte);
        let (sent, empty) = client.send(out, 1000).await;
        assert_eq!(sent?, 1000);
        out = empty;
    }
    let (received, all) = all.await;
    assert_eq!(received?, 3000);
    assert!(
        all.iter()
            .enumerate()
            .all(|(i, b)| usize::from(*b) == i / 1000 + 1)
    );
    Ok(())
}

/// Memory that the client shares and the server reads, and memory of the server that the client writes.
async fn memory(listener: Listener, addr: std::net::SocketAddr) -> io::Result<()> {
    let accepted = thread::spawn(move || block_on(listener.accept()));
    let client = Socket::connect(addr).await?;
    let server = accepted
        .join()
        .map_err(|_| io::Error::other("the server panicked"))??;
    let shared = client.share(Buffer::new(100)?)?;
    let mut copy = Buffer::new(100)?;
    for turn in 1..=3 {
        shared.write(10, &[turn; 5]);
        let (received, new) = server.recv(copy).await;
        assert_eq!(received?, 100);
        let seen = [0, turn, turn, turn, turn, turn, 0];
        assert_eq!(new.get(9..16), Some(&seen[..]));
        copy = new;
    }
    let (received, part) = server.recv_at(Buffer::new(5)?, 10).await;
    assert_eq!((received?, &part[..]), (5, &[3; 5][..]));
    let (ended, buffer) = shared.end().await;
    ended?;
    assert_eq!(buffer.get(10), Some(&3));

    let open = server.open(Buffer::new(100)?)?;
    let (sent, _) = client.send_at(part, 5, 50).await;
    assert_eq!(sent?, 5);
    // The completion of a send means only that its buffer is free. The end of the opened memory means that all data has
    // arrived.
    let (ended, buffer) = open.end().await;
    ended?;
    assert_eq!(buffer.get(49..56), Some(&[0, 3, 3, 3, 3, 3, 0][..]));
    println!("memory was read and written");
    Ok(())
}

fn main() -> io::Result<()> {
    let listener = Listener::bind("127.0.0.1:0".parse().map_err(io::Error::other)?)?;
    let addr = listener.local_addr()?;
    let server = thread::spawn(|| block_on(serve(listener)));
    block_on(call(addr))?;
    let messages = server
        .join()
        .map_err(|_| io::Error::other("the server panicked"))??;
    assert_eq!(messages, 4);
    println!("{messages} messages");
    let any = "127.0.0.1:0".parse().map_err(io::Error::other)?;
    let listener = Listener::bind_stream(any)?;
    let addr = listener.local_addr()?;
    block_on(stream(listener, addr))?;
    let listener = Listener::bind(any)?;
    let addr = listener.local_addr()?;
    block_on(memory(listener, addr))
}
