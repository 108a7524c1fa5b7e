//! What a program becomes on the device: a list of launches with every address and size filled in.

use crate::Result;
use crate::args::{Args, Grid};
use crate::device::{Function, Stream};
use std::rc::Rc;

/// A kernel, a library call or a copy to put on the stream.
pub(crate) struct Launch {
    /// Index of the op in the program.
    pub op: usize,
    /// Index of the first op whose work it does: an earlier one where it replaces that one's launch.
    pub first: usize,
    /// What profiles call it: the kernel's or library's name.
    pub name: &'static str,
    pub work: Work,
}

/// What a launch does.
pub(crate) enum Work {
    Kernel(KernelLaunch),
    /// A library call: cuBLASLt, cuDNN.
    Call(Rc<dyn LibraryCall>),
    /// `bytes` of zero at an address.
    Zero {
        at: u64,
        bytes: usize,
    },
    /// A copy within the device.
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
}

/// A library call that was prepared for fixed addresses; it may be captured into a graph.
pub(crate) trait LibraryCall {
    fn enqueue(&self, stream: &Stream) -> Result<()>;

    /// Whether it is for the stream of what ranks exchange, whichever op asks for it: all ranks must make such calls in one order.
    fn exchanges(&self) -> bool {
        false
    }
}

/// One of our kernels with its arguments.
pub(crate) struct KernelLaunch {
    pub function: Function,
    pub grid: Grid,
    pub args: Args,
    /// Whether it may start before the launch ahead of it has ended; it waits for that end itself (common/chain.cuh).
    pub chained: bool,
}

impl Launch {
    /// Whether it is for the stream of what ranks exchange.
    pub fn exchanges(&self) -> bool {
        matches!(&self.work, Work::Call(call) if call.exchanges())
    }

    /// Makes it begin only when everything ahead of it has ended.
    pub fn unchain(&mut self) {
        if let Work::Kernel(kernel) = &mut self.work {
            kernel.chained = false;
        }
    }

    /// Puts it on the stream.
    pub fn enqueue(&mut self, stream: &Stream) -> Result<()> {
        match &mut self.work {
            Work::Kernel(KernelLaunch { function, grid, args, chained }) => {
                // SAFETY: the pointers are those of the arguments, which every launcher passes as its kernel's signature has them.
                unsafe { stream.launch_with(*function, *grid, &mut args.pointers(), *chained) }
            }
            Work::Call(call) => call.enqueue(stream),
            Work::Zero { at, bytes } => stream.zero(*at, *bytes),
            Work::Copy { to, from, bytes } => stream.copy(*to, *from, *bytes),
        }
    }
}
