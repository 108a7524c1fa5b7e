//! Starts the ranks of one machine: this program again, once for each.

use crate::environment::ours;
use crate::proof::new_token;
use ironhorse_core::ranks::RESUMABLE;
use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The ranks that were started, and how they ended.
pub struct Local {
    ranks: Vec<(Child, Option<i32>)>,
    /// Whether those that did not end have been killed.
    killed: bool,
}

/// The code of a process that a signal ended, as shells have it: 128 and the signal.
const BY_SIGNAL: i32 = 128;
/// How long ranks have to notice by themselves that a signal has ended one. Those that have not met yet cannot, and are asked to
/// stop.
const TO_NOTICE: Duration = Duration::from_secs(2);
/// How often to look whether one has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Starts `world` ranks of this program with these arguments. Rank 0 has this terminal; what others print on standard output is
/// dropped.
pub fn launch(arguments: &[OsString], world: usize) -> io::Result<Local> {
    let program = std::env::current_exe()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (port, token) = (listener.local_addr()?.port(), new_token()?);
    let mut listener = Some(listener);
    let mut local = Local { ranks: Vec::new(), killed: false };
    for rank in 0..world {
        let mut command = Command::new(&program);
        command.args(arguments);
        for (name, value) in [
            (ours::RANK, rank.to_string()),
            (ours::WORLD, world.to_string()),
            (ours::LOCAL_RANK, rank.to_string()),
            (ours::ADDRESS, "127.0.0.1".to_owned()),
            (ours::PORT, port.to_string()),
            (ours::TOKEN, token.clone()),
        ] {
            command.env(name, value);
        }
        match listener.take() {
            #[cfg(unix)]
            Some(listener) => {
                command.env(ours::LISTENER, "stdin").stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)));
            }
            #[cfg(not(unix))]
            Some(listener) => drop(listener),
            None => {
                command.env_remove(ours::LISTENER).stdin(Stdio::null()).stdout(Stdio::null());
            }
        }
        match command.spawn() {
            Ok(child) => local.ranks.push((child, None)),
            Err(error) => {
                local.end();
                return Err(error);
            }
        }
    }
    Ok(local)
}

impl Local {
    /// Waits for all; `each` is called now and then, with the process of rank 0 while it runs. Ranks that do not end within `grace`
    /// after one has failed are killed. Gives the exit codes; what was killed so says nothing of its own, but that it was lost.
    pub fn wait(mut self, grace: Duration, mut each: impl FnMut(Option<u32>)) -> Vec<i32> {
        let (mut until, mut lost, mut asked) = (None, None, false);
        loop {
            let killed = self.killed;
            for (child, ended) in self.ranks.iter_mut().filter(|(_, ended)| ended.is_none()) {
                match child.try_wait() {
                    Ok(Some(status)) => {
                        let code = code(status);
                        let lost = killed && code >= BY_SIGNAL;
                        *ended = Some(if lost { RESUMABLE.into() } else { code });
                    }
                    Ok(None) => {}
                    Err(_) => *ended = Some(2),
                }
            }
            let codes: Vec<i32> = self.ranks.iter().filter_map(|(_, ended)| *ended).collect();
            if codes.len() == self.ranks.len() {
                return codes;
            }
            if !asked
                && codes.iter().any(|code| *code >= BY_SIGNAL)
                && Instant::now() > *lost.get_or_insert_with(|| Instant::now() + TO_NOTICE)
            {
                self.ask_to_stop();
                asked = true;
            }
            if codes.iter().any(|code| *code != 0)
                && Instant::now() > *until.get_or_insert_with(|| Instant::now() + grace)
            {
                self.killed = true;
                self.ranks.iter_mut().for_each(|(child, _)| drop(child.kill()));
            }
            let leader = self.ranks.first().filter(|(_, ended)| ended.is_none()).map(|(child, _)| child.id());
            each(leader);
            std::thread::sleep(LOOK);
        }
    }

    /// Asks those that run to stop.
    fn ask_to_stop(&self) {
        #[cfg(unix)]
        for (child, _) in self.ranks.iter().filter(|(_, ended)| ended.is_none()) {
            use rustix::process::{Pid, Signal, kill_process};
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
    }

    /// Ends those that were started, after one could not be.
    fn end(&mut self) {
        for (child, _) in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn code(status: std::process::ExitStatus) -> i32 {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        if let Some(signal) = status.signal() {
            return BY_SIGNAL + signal;
        }
    }
    status.code().unwrap_or(BY_SIGNAL)
}
