#pragma once

// Lists the members of the samples of a monitor, for sums, JSON and tests.

#include <shoestring/runs/monitor.h>

namespace shoestring::runs {

/// How the value of a long interval follows from the values of its parts.
enum class Merge { kLast, kSum, kPeak };

/// Call visit(name, member, merge) for each field of a GPU or of a sample.
template <class Visit>
void visit_gpu_fields(const Visit& visit) {
  visit("busy_seconds", &MonitorGpu::busy_seconds, Merge::kSum);
  visit("memory_peak", &MonitorGpu::memory_peak, Merge::kPeak);
  visit("energy", &MonitorGpu::energy, Merge::kSum);
  visit("hot_seconds", &MonitorGpu::hot_seconds, Merge::kSum);
  visit("power_limited_seconds", &MonitorGpu::power_limited_seconds, Merge::kSum);
  visit("is_used", &MonitorGpu::is_used, Merge::kPeak);
}

template <class Visit>
void visit_sample_fields(const Visit& visit) {
  visit("time", &MonitorSample::time, Merge::kLast);
  visit("seconds", &MonitorSample::seconds, Merge::kSum);
  visit("cpu_seconds", &MonitorSample::cpu_seconds, Merge::kSum);
  visit("thread_seconds", &MonitorSample::thread_seconds, Merge::kSum);
  visit("machine_cpu_seconds", &MonitorSample::machine_cpu_seconds, Merge::kSum);
  visit("memory_peak", &MonitorSample::memory_peak, Merge::kPeak);
  visit("machine_memory_peak", &MonitorSample::machine_memory_peak, Merge::kPeak);
  visit("swapped_bytes", &MonitorSample::swapped_bytes, Merge::kSum);
  visit("major_faults", &MonitorSample::major_faults, Merge::kSum);
  visit("read_bytes", &MonitorSample::read_bytes, Merge::kSum);
  visit("written_bytes", &MonitorSample::written_bytes, Merge::kSum);
  visit("disk_seconds", &MonitorSample::disk_seconds, Merge::kSum);
  visit("memory_stall_seconds", &MonitorSample::memory_stall_seconds, Merge::kSum);
  visit("processes", &MonitorSample::processes, Merge::kPeak);
  visit("wait_seconds", &MonitorSample::wait_seconds, Merge::kSum);
  visit("starved_seconds", &MonitorSample::starved_seconds, Merge::kSum);
  visit("step_seconds", &MonitorSample::step_seconds, Merge::kSum);
  visit("steps", &MonitorSample::steps, Merge::kSum);
  visit("device_memory_peak", &MonitorSample::device_memory_peak, Merge::kPeak);
}

/// Adds the interval that follows to `sample`.
void append(MonitorSample& sample, const MonitorSample& next);

/// Reads a machine and samples from the JSON of a report, whose other members it ignores. Throws
/// std::exception if a value has another type.
MonitorReport report_of_json(const std::string& text);

}  // namespace shoestring::runs
