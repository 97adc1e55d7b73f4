#pragma once

// Lists the fields of situations and plans, for reading, writing and checking them.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <shoestring/planning/plan_training.h>

namespace shoestring {

// The functions fields() list the fields of each structure once. They are in the namespace of the structures,
// where argument-dependent lookup finds them.

template <class Visit>
void fields(Visit&& visit, PlanChoice& c) {
  visit("name", c.name);
  visit("bytes", c.bytes);
  visit("extra_seconds", c.extra_seconds);
  visit("link_bytes", c.link_bytes);
  visit("forward_bytes", c.forward_bytes);
  visit("backward_bytes", c.backward_bytes);
}

template <class Visit>
void fields(Visit&& visit, PlanBlock& b) {
  visit("forward_seconds", b.forward_seconds);
  visit("backward_seconds", b.backward_seconds);
  visit("choices", b.choices);
  visit("gradient_bytes", b.gradient_bytes);
}

template <class Visit>
void fields(Visit&& visit, MeasuredPass& p) {
  visit("rows", p.rows);
  visit("freed", p.freed);
  visit("kept", p.kept);
}

template <class Visit>
void fields(Visit&& visit, OptimizerWay& w) {
  visit("state", w.state);
  visit("step_in_backward", w.step_in_backward);
  visit("offload", w.offload);
  visit("freedom", w.freedom);
  visit("device_bytes", w.device_bytes);
  visit("host_bytes", w.host_bytes);
  visit("disk_bytes", w.disk_bytes);
  visit("step_bytes", w.step_bytes);
  visit("gradient_bytes", w.gradient_bytes);
  visit("sum_bytes", w.sum_bytes);
  visit("seconds", w.seconds);
  visit("backward_seconds", w.backward_seconds);
  visit("sum_seconds", w.sum_seconds);
}

template <class Visit>
void fields(Visit&& visit, WeightsPlace& p) {
  visit("place", p.place);
  visit("keep", p.keep);
  visit("tiles", p.tiles);
  visit("device_bytes", p.device_bytes);
  visit("host_bytes", p.host_bytes);
  visit("disk_bytes", p.disk_bytes);
  visit("seconds", p.seconds);
}

template <class Visit>
void fields(Visit&& visit, TrainingForm& f) {
  visit("precision", f.precision);
  visit("weights", f.weights);
  visit("adapters", f.adapters);
  visit("quantize", f.quantize);
  visit("freedom", f.freedom);
  visit("gradient_bytes", f.gradient_bytes);
  visit("load_bytes", f.load_bytes);
  visit("saving_bytes", f.saving_bytes);
  visit("kinds", f.kinds);
  visit("passes", f.passes);
  visit("optimizers", f.optimizers);
  visit("places", f.places);
}

template <class Visit>
void fields(Visit&& visit, Situation& s) {
  visit("model", s.model);
  visit("machine", s.machine);
  visit("blocks", s.blocks);
  visit("workspaces", s.workspaces);
  visit("batch_size", s.batch_size);
  visit("device_memory", s.device_memory);
  visit("host_memory", s.host_memory);
  visit("disk", s.disk);
  visit("host_is_device", s.host_is_device);
  visit("reserve_bytes", s.reserve_bytes);
  visit("out_bytes_per_second", s.out_bytes_per_second);
  visit("in_bytes_per_second", s.in_bytes_per_second);
  visit("copy_share", s.copy_share);
  visit("prefetch", s.prefetch);
  visit("forms", s.forms);
}

template <class Visit>
void fields(Visit&& visit, BlockPlan& b) {
  visit("block", b.block);
  visit("treatment", b.treatment);
  visit("pending_bytes", b.pending_bytes);
  visit("link_bytes", b.link_bytes);
}

template <class Visit>
void fields(Visit&& visit, PlanPhase& p) {
  visit("name", p.name);
  visit("bytes", p.bytes);
}

template <class Visit>
void fields(Visit&& visit, PlanReason& r) {
  visit("lever", r.lever);
  visit("text", r.text);
}

template <class Visit>
void fields(Visit&& visit, PlanAlternative& a) {
  visit("freedom", a.freedom);
  visit("levers", a.levers);
  visit("peak_bytes", a.peak_bytes);
  visit("seconds", a.seconds);
}

template <class Visit>
void fields(Visit&& visit, PlanPoint& p) {
  visit("peak_bytes", p.peak_bytes);
  visit("seconds", p.seconds);
  visit("micro_batch", p.micro_batch);
  visit("recomputed", p.recomputed);
}

template <class Visit>
void fields(Visit&& visit, TrainingPlan& p) {
  visit("model", p.model);
  visit("machine", p.machine);
  visit("freedom", p.freedom);
  visit("micro_batch", p.micro_batch);
  visit("accumulate", p.accumulate);
  visit("precision", p.precision);
  visit("weights", p.weights);
  visit("adapters", p.adapters);
  visit("quantize", p.quantize);
  visit("optimizer_state", p.optimizer_state);
  visit("step_in_backward", p.step_in_backward);
  visit("offload", p.offload);
  visit("weights_place", p.weights_place);
  visit("keep", p.keep);
  visit("tiles", p.tiles);
  visit("parallel", p.parallel);
  visit("workspace_mb", p.workspace_mb);
  visit("checkpoints", p.checkpoints);
  visit("phases", p.phases);
  visit("peak_bytes", p.peak_bytes);
  visit("host_bytes", p.host_bytes);
  visit("disk_bytes", p.disk_bytes);
  visit("seconds", p.seconds);
  visit("least_seconds", p.least_seconds);
  visit("reasons", p.reasons);
  visit("alternatives", p.alternatives);
  visit("frontier", p.frontier);
}

namespace planning {

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

using Texts = std::map<std::string, std::string>;
using Tiles = std::map<std::string, int64_t>;
using MaybeInt = std::optional<int64_t>;

}  // namespace planning
}  // namespace shoestring
