//! Null, negative, overflowing, overlapping and misaligned arguments give an error that names the argument, and nothing
//! is written.

use super::common::*;
use ironhorse::ops;
use std::ptr::{null, null_mut};

const HUGE: i64 = i64::MAX;

#[test]
fn every_op_refuses_null_and_bad_sizes() {
    let (f, i) = (vec![1.0_f32; 64], vec![0_i32; 64]);
    let (mut o, mut j) = (vec![7.0_f32; 64], vec![7_i32; 64]);
    let (mut o2, mut o3) = (vec![7.0_f32; 64], vec![7.0_f32; 64]);
    let (x, idx, seeds) = (f.as_ptr(), i.as_ptr(), [1_u64; 8]);
    let (y, z, w, k, s) = (o.as_mut_ptr(), o2.as_mut_ptr(), o3.as_mut_ptr(), j.as_mut_ptr(), seeds.as_ptr());
    let (nul, out): (*const f32, *mut f32) = (null(), null_mut());
    // SAFETY: every call returns an error before it accesses memory.
    let results = unsafe {
        vec![
            ops::silu(nul, y, 4, S),
            ops::silu(x, out, 4, S),
            ops::silu(x, y, -1, S),
            ops::silu(x, y, HUGE, S),
            ops::silu(x, y, 1 << 45, S),
            ops::gelu(nul, y, 4, S),
            ops::gelu(x, y, -1, S),
            ops::scale(nul, y, 1.0, 4, S),
            ops::scale(x, y, 1.0, i64::MIN, S),
            ops::add(x, nul, y, 4, S),
            ops::add(x, x, y, HUGE, S),
            ops::mul(nul, x, y, 4, S),
            ops::mul(x, x, out, 4, S),
            ops::swiglu(x, nul, y, 4, S),
            ops::softmax(x, y, -1, 4, S),
            ops::softmax(x, y, 1 << 40, 1 << 40, S),
            ops::softmax(nul, y, 2, 2, S),
            ops::softmax_topk(x, y, k, 2, 2, 3, S),
            ops::softmax_topk(x, y, k, 2, 2, -1, S),
            ops::softmax_topk(x, y, null_mut(), 2, 2, 1, S),
            ops::rmsnorm(x, nul, y, 2, 2, 1e-5, S),
            ops::rmsnorm(x, x, y, 2, -2, 1e-5, S),
            ops::rmsnorm(x, x, y, 2, 2, -1.0, S),
            ops::rmsnorm(x, x, y, 2, 2, f32::NAN, S),
            ops::rmsnorm(x, x, y, 1 << 33, 1 << 33, 1e-5, S),
            ops::rmsnorm_residual(x, nul, x, y, z, 2, 2, 1e-5, S),
            ops::rmsnorm_residual(x, x, x, y, out, 2, 2, 1e-5, S),
            ops::rmsnorm_residual(x, x, x, y, y, 2, 2, 1e-5, S),
            ops::layernorm(x, x, nul, y, 2, 2, 1e-5, S),
            ops::layernorm(x, x, x, y, HUGE, 2, 1e-5, S),
            ops::gemm(x, x, y, -1, 2, 2, 1.0, 0.0, S),
            ops::gemm(x, x, y, 1 << 31, 1 << 31, 2, 1.0, 0.0, S),
            ops::gemm(x, nul, y, 2, 2, 2, 1.0, 0.0, S),
            ops::gemm(x, y, y, 2, 2, 2, 1.0, 0.0, S),
            ops::gemm_batched(x, x, y, HUGE, 2, 2, 2, 1.0, 0.0, S),
            ops::gemm_batched(x, x, out, 1, 2, 2, 2, 1.0, 0.0, S),
            ops::rope_freqs(out, 4, 4, 1e4, 1.0, S),
            ops::rope_freqs(y, 4, 3, 1e4, 1.0, S),
            ops::rope_freqs(y, 4, 4, 0.0, 1.0, S),
            ops::rope_freqs(y, 4, 4, 1e4, f32::NAN, S),
            ops::rope_forward(x, nul, y, 1, 2, 2, 4, 0, S),
            ops::rope_forward(x, x, y, 1, 2, 2, 4, -1, S),
            ops::rope_forward(x, x, y, 1, 2, 2, 4, HUGE, S),
            ops::rope_forward(x, x, y, 1, 2, 2, 5, 0, S),
            ops::rope_forward_half(x, x, out, 1, 2, 2, 4, 0, S),
            ops::rope_qk(x, nul, x, y, z, 1, 2, 2, 1, 4, 0, S),
            ops::rope_qk(x, x, x, y, y, 1, 2, 2, 1, 4, 0, S),
            ops::rope_qk_half(x, x, x, y, z, 1, 2, 2, -1, 4, 0, S),
            ops::flash_attention(x, x, nul, y, 1, 2, 2, 4, 1.0, true, S),
            ops::flash_attention(x, x, x, y, 1, HUGE, 2, 4, 1.0, true, S),
            ops::attention(x, x, x, y, 1, 2, 2, 4, 3, 2, 1.0, true, S),
            ops::attention(x, x, x, y, 1, 2, -2, 4, 2, 2, 1.0, true, S),
            ops::attention(x, x, x, y, 1, 2, 2, 4, 0, 2, 1.0, true, S),
            ops::cross_entropy_forward(x, null(), y, z, 2, 2, S),
            ops::cross_entropy_forward(x, idx, y, y, 2, 2, S),
            ops::cross_entropy_forward(x, [0, 2].as_ptr(), y, z, 2, 2, S),
            ops::cross_entropy_forward(x, [-100, 1].as_ptr(), y, z, 2, 2, S),
            ops::cross_entropy_forward(x, idx, y, z, 2, 0, S),
            ops::cross_entropy_backward(x, [0, 2].as_ptr(), y, 2, 2, 1.0, S),
            ops::cross_entropy_backward(nul, idx, y, 2, 2, 1.0, S),
            ops::aux_loss_forward(x, [0, 4].as_ptr(), y, z, w, 1, 4, 2, 0.1, S),
            ops::aux_loss_forward(x, idx, y, z, z, 1, 4, 2, 0.1, S),
            ops::aux_loss_forward(x, idx, y, z, w, 1, 4, -2, 0.1, S),
            ops::adamw_step(y, x, z, w, 0.1, 0.9, 0.99, 1e-8, 0.0, 0, 4, S),
            ops::adamw_step(y, x, z, w, 0.1, 1.0, 0.99, 1e-8, 0.0, 1, 4, S),
            ops::adamw_step(y, x, z, w, f32::NAN, 0.9, 0.99, 1e-8, 0.0, 1, 4, S),
            ops::adamw_step(y, nul, z, w, 0.1, 0.9, 0.99, 1e-8, 0.0, 1, 4, S),
            ops::adamw_step(y, x, z, z, 0.1, 0.9, 0.99, 1e-8, 0.0, 1, 4, S),
            ops::zero_grad(out, 4, S),
            ops::zero_grad(y, -4, S),
            ops::grad_clip(y, z, out, 1.0, 4, S),
            ops::grad_clip(y, z, w, -1.0, 4, S),
            ops::scatter_add(x, [0, -1].as_ptr(), y, 2, 2, S),
            ops::scatter_add(x, [0, i32::MAX].as_ptr(), y, 2, 1 << 31, S),
            ops::scatter_add_rows(x, [0, 4].as_ptr(), y, 2, 2, 4, S),
            ops::scatter_add_rows(nul, idx, y, 2, 2, 4, S),
            ops::argmax(x, k, 2, 0, S),
            ops::argmax(x, null_mut(), 2, 2, S),
            ops::argmax(x, k, 2, HUGE, S),
            ops::sample(x, k, null(), 2, 2, 1.0, S),
            ops::sample(x, k, s, 2, 2, -1.0, S),
            ops::sample(x, k, s, 2, 2, f32::NAN, S),
            ops::topk_sample(x, k, s, 2, 2, 0, 1.0, S),
            ops::topp_sample(x, k, s, 2, 2, 0.0, 1.0, S),
            ops::topp_sample(x, k, s, 2, 2, f32::NAN, 1.0, S),
        ]
    };
    for (number, result) in results.into_iter().enumerate() {
        let error = result.expect_err(&format!("call {number} was not refused"));
        assert_eq!(error.code, Code::InvalidValue, "call {number}: {error}");
        assert!(error.text.contains('`') && error.text.contains("expected"), "call {number}: {error}");
    }
    assert!(o.iter().chain(&o2).chain(&o3).all(|&x| x == 7.0) && j.iter().all(|&x| x == 7));
}

#[test]
fn overlap_and_alignment() {
    let mut x = vec![1.0_f32; 20];
    let p = x.as_mut_ptr();
    // SAFETY: each call returns an error before it accesses memory, or stays within the array.
    unsafe {
        invalid(ops::silu(p, p.add(1), 10, S), "`out` overlaps `x` in part");
        invalid(ops::softmax(p.add(5), p, 2, 5, S), "overlaps");
        invalid(ops::silu(p.byte_add(1), p.add(10), 5, S), "a multiple of 4");
        ops::silu(p, p.add(10), 10, S).unwrap();
    }
}

#[test]
fn empty_arrays_may_be_null() {
    let (f, o): (*const f32, *mut f32) = (null(), null_mut());
    let (i, io): (*const i32, *mut i32) = (null(), null_mut());
    // SAFETY: with 0 elements no memory is accessed.
    unsafe {
        ops::silu(f, o, 0, S).unwrap();
        ops::add(f, f, o, 0, S).unwrap();
        ops::softmax(f, o, 0, 7, S).unwrap();
        ops::softmax(f, o, HUGE, 0, S).unwrap();
        ops::rmsnorm(f, f, o, 0, 7, 1e-5, S).unwrap();
        ops::layernorm(f, f, f, o, 7, 0, 1e-5, S).unwrap();
        ops::gemm(f, f, o, 0, 7, HUGE, 1.0, 1.0, S).unwrap();
        ops::rope_forward(f, f, o, 0, 1, 1, 2, 5, S).unwrap();
        ops::flash_attention(f, f, f, o, 1, 0, 1, 1, 1.0, true, S).unwrap();
        ops::cross_entropy_forward(f, i, o, o, 0, 7, S).unwrap();
        ops::cross_entropy_backward(f, i, o, 0, 7, 1.0, S).unwrap();
        ops::adamw_step(o, f, o, o, 0.1, 0.9, 0.99, 1e-8, 0.0, 1, 0, S).unwrap();
        ops::zero_grad(o, 0, S).unwrap();
        ops::scatter_add(f, i, o, 0, 7, S).unwrap();
        ops::argmax(f, io, 0, 7, S).unwrap();
        ops::sample(f, io, null(), 0, 7, 1.0, S).unwrap();
    }
}
