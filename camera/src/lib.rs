//! Where pictures come from: files now read into RGB, and cut into the crops that the model looks at.
//!
//! Relies on `forerun-engine` for the sizes of crops. Never changes what the reference processor would feed the model.
#![forbid(unsafe_code)]

pub mod picture;
pub mod resize;
