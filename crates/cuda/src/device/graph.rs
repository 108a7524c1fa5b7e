//! Changes of a recorded graph before it is made ready to run.

use super::Device;
use crate::Result;
use crate::ffi::driver::call;
use crate::memory::COUNTER_BYTES;
use cudarc::driver::sys::{
    CUDA_MEMSET_NODE_PARAMS, CUgraph, CUgraphNode, CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_MEMSET,
};
use std::collections::HashMap;
use std::ops::Range;

/// Takes out each fill of a single counter with zero and keeps the fill of all; the nodes behind a removed fill depend on the nodes ahead
/// of it. A product of cuBLASLt on Hopper begins with such a fill of 4 bytes, which costs 2 µs. A counter that is filled more than once
/// keeps its fills.
pub(super) fn without_fills(device: &Device, graph: CUgraph, counters: &Range<u64>) -> Result<()> {
    if counters.is_empty() {
        return Ok(());
    }
    let mut fills = Vec::new();
    for node in all(|to, count| call!(device, cuGraphGetNodes(graph, to, count)))? {
        if let Some(at) = filled(device, node, counters)? {
            fills.push((node, (at - counters.start) / COUNTER_BYTES as u64));
        }
    }
    let mut times: HashMap<u64, usize> = HashMap::new();
    fills.iter().for_each(|(_, counter)| *times.entry(*counter).or_default() += 1);
    fills.retain(|(_, counter)| times[counter] == 1);
    for (node, _) in fills {
        let ahead = all(|to, count| call!(device, cuGraphNodeGetDependencies(node, to, count)))?;
        let behind = all(|to, count| call!(device, cuGraphNodeGetDependentNodes(node, to, count)))?;
        for (from, to) in ahead.iter().flat_map(|from| behind.iter().map(move |to| (from, to))) {
            call!(device, cuGraphAddDependencies(graph, from, to, 1))?;
        }
        call!(device, cuGraphDestroyNode(node))?;
    }
    Ok(())
}

/// The address at which a node fills a part of `counters` with zero, if it does.
fn filled(device: &Device, node: CUgraphNode, counters: &Range<u64>) -> Result<Option<u64>> {
    let mut kind = 0;
    call!(device, cuGraphNodeGetType(node, &mut kind))?;
    if kind != CU_GRAPH_NODE_TYPE_MEMSET as u32 {
        return Ok(None);
    }
    let (pitch, value, width, height) = (0, 0, 0, 0);
    let mut fill = CUDA_MEMSET_NODE_PARAMS { dst: 0, pitch, value, elementSize: 0, width, height };
    call!(device, cuGraphMemsetNodeGetParams(node, &mut fill))?;
    let bytes = fill.width as u64 * u64::from(fill.elementSize);
    let inside = counters.start <= fill.dst && fill.dst + bytes <= counters.end;
    let part = inside && fill.height == 1 && fill.value == 0 && bytes <= COUNTER_BYTES as u64;
    // with one counter the fill of all is larger than what the library needs of it
    Ok((part && bytes < counters.end - counters.start).then_some(fill.dst))
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
