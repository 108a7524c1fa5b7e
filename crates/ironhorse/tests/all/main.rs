//! The tests of whole models and of eager ops, one program for all: a program for each would link the engines again.
//! Apart are those that count the allocations of the process or change its settings, and `generated`.

mod any_shape;
mod bad_run;
mod bad_step;
mod counted;
mod fp8;
mod lora;
mod muon;
mod odd_engine;
mod ops;
mod optimizer_state;
mod packed;
mod precision;
mod preference;
mod ranks;
mod save_together;
mod serving;
mod small;
mod steps;
