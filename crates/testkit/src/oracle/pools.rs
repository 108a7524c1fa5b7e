//! The oracle's memory: one f64 cell for every byte of a pool.
//!
//! An element is stored in the first cell of its bytes, so slots of one element type alias as they do in real memory
//! (sub-slots, flat views). 32-bit integers are exact in f64.

use ironhorse_core::{Error, Layout, Pool, Result, Slot};

/// Bytes that one cell represents: the size of the smallest element.
const CELL: usize = 1;

#[derive(Debug, Default)]
pub(crate) struct Pools {
    cells: [Vec<f64>; Pool::ALL.len()],
}

impl Pools {
    pub fn reserve(&mut self, layout: &Layout) {
        for pool in Pool::ALL {
            let need = layout.bytes(pool).div_ceil(CELL);
            let cells = &mut self.cells[pool.index()];
            cells.resize(need.max(cells.len()), 0.0);
        }
    }

    pub fn bytes(&self) -> usize {
        self.cells.iter().map(|cells| cells.len() * CELL).sum()
    }

    /// A slot's elements.
    pub fn read(&self, slot: Slot) -> Result<Vec<f64>> {
        self.check(&slot)?;
        let (first, stride) = (slot.offset / CELL, slot.dtype.size() / CELL);
        let cells = &self.cells[slot.pool.index()];
        Ok((0..slot.numel()).map(|i| cells[first + i * stride]).collect())
    }

    /// Overwrites a slot's elements.
    pub fn write(&mut self, slot: Slot, values: &[f64]) -> Result<()> {
        self.check(&slot)?;
        ironhorse_core::check_host_len(&slot, values.len())?;
        let (first, stride) = (slot.offset / CELL, slot.dtype.size() / CELL);
        let cells = &mut self.cells[slot.pool.index()];
        for (i, &value) in values.iter().enumerate() {
            cells[first + i * stride] = value;
        }
        Ok(())
    }

    /// Overwrites, or adds to the old contents. Overwriting does not read them.
    pub fn store(&mut self, slot: Slot, values: &[f64], adds: bool) -> Result<()> {
        if !adds {
            return self.write(slot, values);
        }
        let old = self.read(slot)?;
        let sum: Vec<f64> = old.iter().zip(values).map(|(old, new)| old + new).collect();
        self.write(slot, &sum)
    }

    fn check(&self, slot: &Slot) -> Result<()> {
        let held = self.cells[slot.pool.index()].len() * CELL;
        if slot.offset.is_multiple_of(CELL) && slot.end() <= held {
            return Ok(());
        }
        Err(Error::Program(format!(
            "{slot:?} is outside its pool of {held} bytes; reserve the program first"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::{Builder, DType, Shape};

    #[test]
    fn flat_views_and_sub_slots_alias() {
        let mut b = Builder::new();
        let whole = b.io("x", [4], DType::F32);
        let narrow = b.io("y", [3], DType::BF16);
        let mut pools = Pools::default();
        pools.reserve(b.finish().unwrap().layout());
        pools.write(whole, &[1.0, 2.0, 3.0, 4.0]).unwrap();
        let tail = Slot { offset: whole.offset + 8, shape: Shape::new([2]), ..whole };
        assert_eq!(pools.read(tail).unwrap(), [3.0, 4.0]);
        pools.store(tail, &[10.0, 20.0], true).unwrap();
        assert_eq!(pools.read(whole).unwrap(), [1.0, 2.0, 13.0, 24.0]);
        pools.write(narrow, &[5.0, 6.0, 7.0]).unwrap();
        let last = Slot { offset: narrow.offset + 4, shape: Shape::new([1]), ..narrow };
        assert_eq!(pools.read(last).unwrap(), [7.0]);
        let beyond = Slot { offset: narrow.offset + 64, ..narrow };
        assert!(pools.read(beyond).unwrap_err().to_string().contains("reserve the program first"));
    }
}
