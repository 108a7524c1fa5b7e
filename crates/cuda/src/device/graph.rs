//! Changes of a recorded graph before it is made ready to run.

use super::Device;
use crate::Result;
use crate::ffi::driver::call;
use cudarc::driver::sys::{
    CUDA_MEMSET_NODE_PARAMS, CUgraph, CUgraphNode, CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_MEMSET,
};
use std::ops::Range;

/// Takes out every fill with zero inside `counters`, but for the one of all of them; what came after it follows what was ahead of it. A
/// product of cuBLASLt on Hopper begins with such a fill of 4 bytes, which costs 2 µs each.
pub(super) fn without_fills(device: &Device, graph: CUgraph, counters: &Range<u64>) -> Result<()> {
    if counters.is_empty() {
        return Ok(());
    }
    for node in all(|to, count| call!(device, cuGraphGetNodes(graph, to, count)))? {
        if !is_fill(device, node, counters)? {
            continue;
        }
        let ahead = all(|to, count| call!(device, cuGraphNodeGetDependencies(node, to, count)))?;
        let behind = all(|to, count| call!(device, cuGraphNodeGetDependentNodes(node, to, count)))?;
        for (from, to) in ahead.iter().flat_map(|from| behind.iter().map(move |to| (from, to))) {
            call!(device, cuGraphAddDependencies(graph, from, to, 1))?;
        }
        call!(device, cuGraphDestroyNode(node))?;
    }
    Ok(())
}

/// Whether a node fills a part of `counters` with zero.
fn is_fill(device: &Device, node: CUgraphNode, counters: &Range<u64>) -> Result<bool> {
    let mut kind = 0;
    call!(device, cuGraphNodeGetType(node, &mut kind))?;
    if kind != CU_GRAPH_NODE_TYPE_MEMSET as u32 {
        return Ok(false);
    }
    let (pitch, value, width, height) = (0, 0, 0, 0);
    let mut fill = CUDA_MEMSET_NODE_PARAMS { dst: 0, pitch, value, elementSize: 0, width, height };
    call!(device, cuGraphMemsetNodeGetParams(node, &mut fill))?;
    let bytes = fill.width as u64 * u64::from(fill.elementSize);
    let inside = counters.start <= fill.dst && fill.dst + bytes <= counters.end;
    Ok(inside && fill.height == 1 && fill.value == 0 && bytes < counters.end - counters.start)
}

/// All nodes of a list that the driver first counts.
fn all(list: impl Fn(*mut CUgraphNode, *mut usize) -> Result<()>) -> Result<Vec<CUgraphNode>> {
    let mut count = 0;
    list(std::ptr::null_mut(), &mut count)?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    if count > 0 {
        list(nodes.as_mut_ptr(), &mut count)?;
    }
    Ok(nodes)
}
