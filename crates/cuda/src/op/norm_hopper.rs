//! How a block of norm/bwd_hopper.cu, the backward of a norm on a Hopper GPU, divides rows among its warps.

use crate::device::DeviceInfo;
use crate::kernels::Spec;
use ironhorse_core::DType;

/// The file of the kernel.
pub(super) const FILE: &str = "norm/bwd_hopper.cu";
/// Widths that it takes where they are whole vectors: a row has at most 8 warps.
const WIDTHS: std::ops::RangeInclusive<usize> = 256..=2048;

/// Rows that a block has together where they become 8 bits, in a forward too: `ROWS` of fp8/row_tile.cuh.
pub(super) const CHUNK: usize = 32;
/// Bytes of shared memory that a block may have then, and the most rows of a ring.
const SHARED: usize = 200 << 10;
const MOST_RING: usize = 6;

/// A block: the constants of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    width: usize,
    /// `COLUMNS`: those of a lane.
    columns: usize,
    /// `GROUPS` of warps, each with a row.
    groups: usize,
    /// `RING`: rows of a group in shared memory.
    ring: usize,
}

impl Block {
    /// For rows of this type and width, if the GPU and the file take them.
    pub fn on(info: &DeviceInfo, act: DType, width: usize) -> Option<Self> {
        if info.compute == (9, 0) { Self::of(act, width) } else { None }
    }

    /// The same on a Hopper GPU. A lane has 10 columns where that leaves none without work, as of 1600, and else 8. So many warps have the
    /// registers for that, and rings of so many rows were the fastest.
    pub fn of(act: DType, width: usize) -> Option<Self> {
        if act != DType::BF16 || !WIDTHS.contains(&width) || !width.is_multiple_of(8) {
            return None;
        }
        let (columns, warps, ring) = if width.is_multiple_of(320) { (10, 20, 3) } else { (8, 24, 4) };
        Some(Self { width, columns, groups: warps / width.div_ceil(32 * columns), ring })
    }

    /// The block of the kernel that rounds its result to 8 bits too, if it takes this width: groups that divide a chunk of rows between them,
    /// with whole vectors for all lanes, and rings of as many rows as fit beside two chunks in 8 bits. With fewer groups or shorter rings too
    /// little would be under way to keep the memory busy.
    pub fn narrowing(self) -> Option<Self> {
        let groups = 1 << self.groups.ilog2();
        let room = SHARED.checked_sub(2 * CHUNK * self.width)?;
        let ring = (room / Self { groups, ring: 1, ..self }.shared()).min(MOST_RING);
        let takes = self.width.is_multiple_of(32 * 8) && self.columns == 8 && groups >= 4 && ring >= 3;
        takes.then_some(Self { groups, ring, ..self })
    }

    /// Bytes of shared memory for the rings of [`Block::narrowing`] and its two chunks.
    pub fn shared_narrowing(&self) -> usize {
        self.shared() + 2 * CHUNK * self.width
    }

    /// Rows under way in it at a time.
    pub fn rows(&self) -> usize {
        self.groups
    }

    pub fn threads(&self) -> u32 {
        (32 * self.groups * self.width.div_ceil(32 * self.columns)) as u32
    }

    /// Bytes of shared memory for the rings: of each row what three tensors have of it, at a multiple of 128 each.
    pub fn shared(&self) -> usize {
        self.groups * self.ring * 3 * (self.width * DType::BF16.size()).next_multiple_of(128)
    }

    /// The specialisation for such a block.
    pub fn define(&self, spec: Spec) -> Spec {
        let sizes = [("COLUMNS", self.columns), ("GROUPS", self.groups), ("RING", self.ring)];
        sizes.into_iter().fold(spec, |spec, (name, size)| spec.define(name, size as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_bf16_are_taken_on_hopper_alone() {
        let on = |compute| DeviceInfo {
            index: 0,
            name: String::new(),
            compute,
            sms: 132,
            memory: 0,
            l2: 0,
            shared_per_block: 227 << 10,
        };
        assert!(Block::on(&on((9, 0)), DType::BF16, 1600).is_some());
        assert!(
            [(8, 0), (8, 9), (10, 0), (12, 0)]
                .iter()
                .all(|&at| Block::on(&on(at), DType::BF16, 1600).is_none())
        );
        assert_eq!(Block::on(&on((9, 0)), DType::F32, 1600), None);
        assert!([248, 1004, 2056, 5120].iter().all(|&width| Block::of(DType::BF16, width).is_none()));
    }

    #[test]
    fn lanes_have_ten_columns_where_none_is_left_without_work() {
        let block = |width| Block::of(DType::BF16, width).map(|it| (it.columns, it.groups, it.threads()));
        assert_eq!(block(1600), Some((10, 4, 640)), "5 warps a row");
        assert_eq!(block(768), Some((8, 8, 768)), "3 warps a row");
        assert_eq!(block(1024), Some((8, 6, 768)));
        assert_eq!(block(2048), Some((8, 3, 768)));
        assert_eq!(block(256), Some((8, 24, 768)));
    }

    #[test]
    fn rows_become_8_bits_where_groups_share_a_chunk() {
        let block =
            |width| Block::of(DType::BF16, width).and_then(Block::narrowing).map(|it| (it.groups, it.ring));
        assert_eq!([256, 512, 768, 1024].map(block), [(16, 6), (8, 6), (8, 4), (4, 5)].map(Some));
        assert_eq!([640, 776, 1280, 1536, 1600, 2048].map(block), [None; 6]);
        for block in (256..=2048).step_by(8).filter_map(|width| Block::of(DType::BF16, width)?.narrowing()) {
            assert!(block.shared_narrowing() <= SHARED && CHUNK.is_multiple_of(block.groups), "{block:?}");
        }
    }

    #[test]
    fn blocks_fit_a_multiprocessor() {
        for block in (256..=2048).step_by(8).filter_map(|width| Block::of(DType::BF16, width)) {
            assert!(block.rows() >= 2 && block.threads() <= 768, "{block:?}");
            assert!(block.shared() <= SHARED, "{block:?}");
            let one_warp = block.threads() as usize == 32 * block.groups;
            assert!(one_warp || block.groups <= 15, "{block:?}: a named barrier for each group");
            // in the end three sums of a column lie where rows were
            assert!(block.shared() / block.groups >= 3 * 4 * block.width, "{block:?}");
        }
    }
}
