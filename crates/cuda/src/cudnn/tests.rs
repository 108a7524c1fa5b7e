//! Plans for an H200 that is only described: cuDNN checks the graphs and picks engines on any GPU machine. It needs a
//! driver, whose compiler it uses, so these tests are ignored unless they are asked for.

use super::attention_bwd::DqSum;
use super::descriptor::{Attribute, Descriptor, Kind};
use super::plan::Target;
use super::{Direction, F16, Lengths, MOST_PLANS, Plan, Shape, accepts, is_refusal, make_plan, room};
use crate::Result;
use crate::ffi::cudnn::Cudnn;
use crate::ffi::library::{DRIVER, NVRTC, Open};
use std::rc::Rc;

/// The fields cuDNN asks of a description, with an H200's values.
const H200: &str = r#"{"deviceName": "NVIDIA H200", "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
    "multiProcessorCount": 132, "smCountOrigin": 0, "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024,
    "oversizedSharedMemoryPerBlock": 0, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000, "l2CacheSize": 62914560, "totalGlobalMem": 150000000000}"#;

fn described() -> Result<(Rc<Cudnn>, Target)> {
    Open::find(DRIVER)?;
    std::mem::forget(Open::find(NVRTC)?); // cuDNN keeps using it
    let cudnn = Rc::new(Cudnn::load()?);
    let mut device = Descriptor::new(&cudnn, Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, "H200")?;
    device.set(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, H200.as_bytes())?;
    device.finalize()?;
    Ok((cudnn, Target::Described(device)))
}

fn gpt2(batch: i64, kv_heads: i64) -> Shape {
    Shape::packed(batch, [12, kv_heads], 1024, 64)
}

fn check(direction: Direction, shape: &Shape, look: impl Fn(&Plan)) {
    let (cudnn, target) = described().unwrap();
    let plan = make_plan(&cudnn, &target, direction, shape).unwrap();
    let version = cudnn.version();
    let Plan { engine, workspace, varies, .. } = plan;
    eprintln!("{version}: {direction:?} {shape:?}: engine {engine}, {workspace} bytes, varies: {varies}");
    look(&plan);
}

#[test]
#[ignore = "needs a driver and cuDNN"]
fn forward_has_an_engine() {
    check(Direction::Forward, &gpt2(64, 12), |plan| assert!(!plan.varies));
}

#[test]
#[ignore = "needs a driver and cuDNN"]
fn repeatable_backward_has_an_engine() {
    let all_scores = 16 * 12 * 1024 * 1024 * 2;
    check(Direction::Backward(DqSum::Fixed), &gpt2(16, 12), |plan| assert!(plan.workspace < 2 * all_scores));
}

#[test]
#[ignore = "needs a driver and cuDNN"]
fn fast_backward_has_an_engine() {
    check(Direction::Backward(DqSum::AnyOrder), &gpt2(64, 12), |plan| assert!(plan.workspace < 1 << 30));
}

#[test]
#[ignore = "needs a driver and cuDNN"]
fn f16_and_all_keys_have_engines() {
    for shape in [Shape { data: F16, ..gpt2(4, 12) }, Shape { causal: false, kv_len: 512, ..gpt2(4, 12) }] {
        check(Direction::Forward, &shape, |_| {});
        check(Direction::Backward(DqSum::Fixed), &shape, |_| {});
    }
}

#[test]
#[ignore = "needs a driver and cuDNN"]
fn grouped_heads_have_engines() {
    let shape = gpt2(4, 4);
    for direction in
        [Direction::Forward, Direction::Backward(DqSum::Fixed), Direction::Backward(DqSum::AnyOrder)]
    {
        check(direction, &shape, |_| {});
    }
}

#[test]
fn the_number_of_shapes_is_limited() {
    assert_eq!(room(MOST_PLANS - 1), Ok(()));
    assert!(is_refusal(&room(MOST_PLANS).unwrap_err()), "our own kernels run the next one");
}

#[test]
fn shapes_it_would_get_wrong_are_refused() {
    let good = gpt2(2, 12);
    assert_eq!(accepts((9, 0), Lengths::Whole, &good), Ok(()));
    assert_eq!(accepts((9, 0), Lengths::Any, &Shape { q_len: 1000, kv_len: 77, ..good }), Ok(()));
    let text = |compute, shape: Shape| accepts(compute, Lengths::Whole, &shape).unwrap_err().to_string();
    assert!(text((7, 5), good).contains("below 8.0"));
    assert!(text((9, 0), Shape { q_len: 1000, ..good }).contains("a sequence of 1000"));
    assert!(text((9, 0), Shape { kv_len: 77, ..good }).contains("a sequence of 77"));
    assert!(text((9, 0), Shape { head_dim: 60, ..good }).contains("a head of 60"));
    assert!(text((8, 0), Shape { head_dim: 256, ..good }).contains("a head of 256"));
    assert!(
        text((9, 0), Shape { out: [1024 * 770, 64, 770], ..good }).contains("steps of [788480, 64, 770]")
    );
    assert!(text((9, 0), Shape { kv_heads: 5, ..good }).contains("5 heads of keys"));
}
