//! An engine that wraps another one and changes its behaviour, to build engines that are broken on purpose.

use ironhorse_core::{
    DeviceDescription, Engine, HostMemory, HostSlice, HostSliceMut, Layout, MakeHostMemory, MemoryUse,
    Pending, Program, Result, Scalars, Slot,
};
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

    /// See [`Engine::read`].
    fn read(&mut self, inner: &mut E, slot: Slot, out: HostSliceMut<'_>) -> Result<()> {
        inner.read(slot, out)
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
    /// The engine with this hook.
    pub fn new(inner: E, hook: H) -> Self {
        Self { hook, inner: Box::new(inner) }
    }
}

impl<E: Engine + ?Sized, H: Hook<E>> Engine for Wrapped<E, H> {
    fn device(&self) -> &DeviceDescription {
        self.inner.device()
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.inner.reserve(layout)
    }

    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> Result<()> {
        self.inner.write(slot, data)
    }

    fn read(&mut self, slot: Slot, out: HostSliceMut<'_>) -> Result<()> {
        self.hook.read(&mut self.inner, slot, out)
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
