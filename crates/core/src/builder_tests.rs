//! Tests of building programs.

use super::*;
use crate::op::{Act, ActFwd, Add, Fill};

#[test]
fn kept_activations_are_not_overwritten_by_the_next_op() {
    let offsets = |kept: usize| {
        let mut b = Builder::new();
        b.keep_activations(kept);
        let [x, y, z] = [(); 3].map(|()| b.activation([100], DType::F32));
        b.push(Fill { out: x, value: 1.0 }).unwrap();
        b.push(ActFwd { out: y, inp: x, act: Act::Gelu }).unwrap();
        b.push(ActFwd { out: z, inp: y, act: Act::Gelu }).unwrap();
        let program = b.finish().unwrap();
        [0, 2].map(|node| program.nodes()[node].op.writes().next().map(|slot| slot.offset))
    };
    let [x, z] = offsets(0);
    assert_eq!(x, z, "the last op may write over the input of the one before");
    let [x, z] = offsets(1);
    assert_ne!(x, z);
}

#[test]
fn planned_programs_reuse_memory_and_keep_their_values() {
    let mut b = Builder::new();
    let out = b.io("out", [100], DType::F32);
    let [x, y, z] = [(); 3].map(|()| b.activation([100], DType::F32));
    b.push(Fill { out: x, value: 1.0 }).unwrap();
    b.push(ActFwd { out: y, inp: x, act: Act::Gelu }).unwrap();
    b.at("z");
    b.push(ActFwd { out: z, inp: y, act: Act::Gelu }).unwrap();
    b.name("z", z);
    b.push(Add { out, a: z, b: z }).unwrap();
    let program = b.finish().unwrap();
    assert_eq!(program.layout().bytes(Pool::Activations), 448 + 400, "two of three buffers live at a time");
    assert_eq!(program.layout().bytes(Pool::Grads), 0);
    assert_eq!(program.values()[0].after, 2);
    assert_eq!(program.origin(&program.nodes()[2]), "z");
    assert_eq!(program.range(Section::Forward), 0..4);
    assert_eq!(program.range(Section::Update), 4..4);
}

#[test]
fn an_inserted_op_moves_what_follows_it() {
    let mut b = Builder::new();
    let [x, y, early] = [(); 3].map(|()| b.activation([100], DType::F32));
    b.at("later");
    b.push(Fill { out: y, value: 1.0 }).unwrap();
    b.name("y", y);
    let since = b.activation_since(0, [100], DType::F32);
    b.push(Add { out: since, a: y, b: y }).unwrap();
    b.at("first");
    b.insert(0, Fill { out: x, value: 2.0 }).unwrap();
    b.insert(1, ActFwd { out: early, inp: x, act: Act::Gelu }).unwrap();
    b.section(Section::Backward);
    let outside = b.insert(1, Fill { out: x, value: 3.0 }).unwrap_err();
    assert!(outside.to_string().contains("inserted at 1 of 4 ops"), "{outside}");
    let program = b.finish().unwrap();
    let names: Vec<_> = program.nodes().iter().map(|node| (node.op.name(), program.origin(node))).collect();
    assert_eq!(names, [("fill", "first"), ("gelu_fwd", "first"), ("fill", "later"), ("add", "later")]);
    assert_eq!(program.values()[0].after, 2);
    // `since` is in use from the op on that is now the third: it may share the memory of what ends before.
    assert_eq!(program.layout().bytes(Pool::Activations), 448 + 400);
}

#[test]
fn a_group_has_no_gaps_inside_and_is_one_slot() {
    for precision in [Precision::F32, Precision::BF16_F32_GRADS] {
        let mut b = Builder::with_precision(precision);
        b.param("before", [3], false);
        let shapes = [("q", [6, 5]), ("k", [1, 5]), ("v", [1, 5])];
        let group = b.param_group(shapes, true);
        let after = b.param("after", [7], false);
        let size = precision.weights.size();
        assert_eq!(
            group.iter().map(|slot| slot.offset / size).collect::<Vec<_>>(),
            [0, 30, 35].map(|at| at + 64 / size)
        );
        assert_eq!((group[0].offset % 64, after.offset), (0, crate::align_up(group[2].end())));
        let all = Slot::joined(&group, [8, 5]).unwrap();
        assert_eq!((all.offset, all.end()), (group[0].offset, group[2].end()));
        let grad = b.grad(all);
        assert_eq!((grad.pool, grad.dtype, grad.shape), (Pool::Grads, DType::F32, all.shape));
        assert_eq!(grad.offset / 4, all.offset / size);
        assert_eq!(
            Slot::joined(&group, [9, 5]).unwrap_err().to_string(),
            "program: 40 elements cannot have shape [9, 5]"
        );
        let apart = Slot::joined(&[group[0], after], [37]).unwrap_err().to_string();
        assert!(apart.starts_with("program: slots are not adjacent in memory"), "{apart}");
        assert_eq!(b.flat(Pool::Params).bytes(), crate::align_up(after.end()));
        assert_eq!(b.params[2].grad().offset, b.grad(group[1]).offset);
    }
}

#[test]
fn reading_before_writing_is_refused() {
    let mut b = Builder::new();
    let [x, y] = [(); 2].map(|()| b.activation([4], DType::F32));
    b.at("h.0");
    b.push(ActFwd { out: y, inp: x, act: Act::Gelu }).unwrap();
    let error = b.finish().unwrap_err().to_string();
    assert_eq!(error, "program: gelu_fwd at h.0 reads `inp` before any op has written it");
}

#[test]
fn wrong_shapes_and_shared_memory_are_refused_with_names() {
    let mut b = Builder::new();
    let x = b.activation([4], DType::F32);
    let y = b.activation([5], DType::F32);
    let error = b.push(ActFwd { out: y, inp: x, act: Act::Gelu }).unwrap_err().to_string();
    assert_eq!(error, "gelu_fwd: `inp` has 4 elements, expected 5");
    let tail = Slot { offset: x.offset + 4, shape: Shape::new([3]), ..x };
    let head = Slot { shape: Shape::new([3]), ..x };
    let error = b.push(ActFwd { out: tail, inp: head, act: Act::Gelu }).unwrap_err().to_string();
    assert_eq!(error, "gelu_fwd: `out` and `inp` share memory");
}
