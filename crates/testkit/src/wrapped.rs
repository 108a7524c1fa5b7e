//! An engine that wraps another one and changes its behaviour, to build engines that are broken on purpose.

use ironhorse_core::{Engine, HostMemory, Layout, MakeHostMemory, Pending, Program, Result, Scalars, Slot};
use std::ops::Range;

/// The engine `inner` with the methods that `hook` overrides.
#[derive(Debug)]
pub struct Wrapped<E: ?Sized, H> {
    /// The overridden methods.
    pub hook: H,
    /// The engine that does the work.
    pub inner: Box<E>,
}

/// The methods that a [`Wrapped`] engine overrides; the default of each calls the inner engine.
pub trait Hook<E: Engine + ?Sized>: Send {
    /// See [`Engine::run`].
    fn run(&mut self, inner: &mut E, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        inner.run(program, ops, scalars)
    }

    /// See [`Engine::read_f32`].
    fn read_f32(&mut self, inner: &mut E, slot: Slot, data: &mut [f32]) -> Result<()> {
        inner.read_f32(slot, data)
    }

    /// See [`Engine::start_read`].
    fn start_read(&mut self, inner: &mut E, slot: Slot) -> Result<Pending> {
        inner.start_read(slot)
    }

    /// See [`Engine::finish_read`].
    fn finish_read(&mut self, inner: &mut E, pending: Pending) -> Result<f32> {
        inner.finish_read(pending)
    }
}

impl<E: Engine, H: Hook<E>> Wrapped<E, H> {
    /// This engine with this hook.
    pub fn new(inner: E, hook: H) -> Self {
        Self { hook, inner: Box::new(inner) }
    }
}

impl<E: Engine + ?Sized, H: Hook<E>> Engine for Wrapped<E, H> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.inner.reserve(layout)
    }

    fn allocated(&self) -> usize {
        self.inner.allocated()
    }

    fn free_memory(&self) -> Option<usize> {
        self.inner.free_memory()
    }

    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> Result<()> {
        self.inner.write_f32(slot, data)
    }

    fn read_f32(&mut self, slot: Slot, data: &mut [f32]) -> Result<()> {
        self.hook.read_f32(&mut self.inner, slot, data)
    }

    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> Result<()> {
        self.inner.write_i32(slot, data)
    }

    fn read_i32(&mut self, slot: Slot, data: &mut [i32]) -> Result<()> {
        self.inner.read_i32(slot, data)
    }

    fn read_bytes(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(slot, out)
    }

    fn write_bytes(&mut self, slot: Slot, data: &[u8]) -> Result<()> {
        self.inner.write_bytes(slot, data)
    }

    fn host_memory(&self) -> MakeHostMemory {
        self.inner.host_memory()
    }

    fn snapshot(&mut self, slots: &[Slot], memory: &mut dyn HostMemory) -> Result<()> {
        self.inner.snapshot(slots, memory)
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        self.hook.run(&mut self.inner, program, ops, scalars)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }

    fn start_read(&mut self, slot: Slot) -> Result<Pending> {
        self.hook.start_read(&mut self.inner, slot)
    }

    fn finish_read(&mut self, pending: Pending) -> Result<f32> {
        self.hook.finish_read(&mut self.inner, pending)
    }
}
