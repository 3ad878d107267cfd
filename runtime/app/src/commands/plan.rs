//! `forerun plan`: the memory plan, line by line.

use super::{mib, say};
use crate::cli::PlanArgs;
use crate::error::AppError;
use crate::model::{Model, model_path};
use crate::session::Look;
use forerun_engine::plan::{Plan, Residency};
use forerun_linux::sys;
use serde_json::json;
use std::fmt::Write;

/// Runs the command.
///
/// # Errors
/// If the file is not a model, or the plan does not fit.
pub fn run(args: &PlanArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    let look = Look::up_to(&model, &args.vision, args.max_pixels);
    let pictures = !args.text_only && model.config.vision.is_some();
    let vision = pictures.then(|| model.vision_options(&look)).transpose()?;
    let mut setup = model.setup(&args.engine, vision);
    setup.options.prefix = true;
    let plan = model.plan(&setup)?;
    if args.json {
        let limit = sys::cgroup_limit_bytes();
        let enforced = plan.cap_bytes.zip(limit).is_some_and(|(cap, limit)| limit <= cap);
        let lines: serde_json::Map<_, _> = plan.lines.iter().map(|l| (l.name.to_owned(), json!(l.bytes))).collect();
        let whole = json!({
            "model": model.config.name,
            "file_bytes": model.file_bytes,
            "cap_bytes": plan.cap_bytes,
            "total_bytes": plan.total_bytes(),
            "enforced": enforced,
            "cgroup_limit_bytes": limit,
            "lines": lines,
            "vision_residency": plan.residency().map(residency),
            "context": plan.options.context,
            "chunk": plan.options.chunk,
            "kv": plan.options.kv.name(),
            "expert_slots": plan.slots,
            "expert_slot_bytes": plan.slot_bytes,
            "experts": plan.experts,
        });
        say(format_args!("{whole}\n"))
    } else {
        say(format_args!("{}, {:.1} MiB on storage\n{}", model.config.name, mib(model.file_bytes), table(&plan)))
    }
}

/// As `--vision-residency` spells it.
pub fn residency(r: Residency) -> &'static str {
    match r {
        Residency::Auto => "auto",
        Residency::Resident => "resident",
        Residency::Streamed => "streamed",
    }
}

/// The plan as people read it. Lines of no bytes are left out.
pub fn table(plan: &Plan) -> String {
    let mut s = String::from("memory plan\n");
    for l in plan.lines.iter().filter(|l| l.bytes > 0) {
        let note = match l.name {
            "expert slots" => {
                format!("  {} of {} experts, {:.2} MiB each", plan.slots, plan.experts, mib(plan.slot_bytes as u64))
            }
            "vision weights" => "  resident".into(),
            "vision window" => format!("  {} slots through which each crop streams the tower", plan.window_slots),
            "prefix state" => "  for chat; run does without".into(),
            "KV cache" => format!("  {} tokens", plan.options.context),
            "activations" if plan.patches_max > 0 => {
                format!("  {} tokens or {} patches at once", plan.options.chunk, plan.patches_max)
            }
            _ => String::new(),
        };
        let _ = writeln!(s, "  {:<18}{:>10.2} MiB{note}", l.name, mib(l.bytes));
    }
    let _ = write!(s, "  {:<18}{:>10.2} MiB", "sum", mib(plan.total_bytes()));
    let _ = match plan.cap_bytes {
        Some(cap) => writeln!(s, "  of a cap of {:.2} MiB", mib(cap)),
        None => writeln!(s),
    };
    s
}
